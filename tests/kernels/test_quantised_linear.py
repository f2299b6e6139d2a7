"""Products with weights of 8 and 4 bits: Triton's kernels against the plain ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specengine.kernels.linear import (
    dequantise_triton,
    fp8_linear_cuda,
    fp8_linear_ref,
    fp8_linear_triton,
    int_linear_triton,
)
from specengine.kernels.linear import fp8_linear as fp8_linear_form
from specengine.kernels.linear.fp8_linear import fp8_linear
from specengine.kernels.linear.int_linear import int_linear
from specengine.kernels.linear.quantised import Fp8Input, Fp8Weight, IntWeight
from specengine.kernels.linear.rounded import NOT_ROUNDED, put_beside, rounding_of
from specengine.kernels.linear.split_sum_triton import Tile, counters_of
from tests.halves import slow_but
from tests.kernels import offline_triton

OUTS, COLUMNS = 72, 256
DTYPES = [torch.float32, torch.float16]
TILE = Tile(32, 64, 1, 4, 2)
quantise = fp8_linear_triton.quantise_rows


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def fp8_weight(kind: str, device: torch.device) -> Fp8Weight:
    if kind == "block a row":  # as rows are when they were reordered across blocks
        return fp8_weight("block", device).by_row()
    rows, columns = {"tensor": (OUTS, COLUMNS), "row": (1, COLUMNS)}.get(kind, (32, 64))
    scale = draw(-(-OUTS // rows), -(-COLUMNS // columns)).abs() / 100
    codes = (60 * draw(OUTS, COLUMNS, seed=1)).to(torch.float8_e4m3fn)
    made = Fp8Weight(codes.to(device), scale.to(device), rows, columns)
    forms = {
        "row": Fp8Input(),
        "tensor": Fp8Input(torch.tensor([0.01], device=device)),
        "block": Fp8Input(group=64),
    }
    return replace(made, input=forms.get(kind))


def int_weight(
    bits: int, zero: str, device: torch.device, ordered: bool = False, group: int = 64
) -> IntWeight:
    made = torch.randint(0, 1 << bits, (OUTS, COLUMNS), dtype=torch.uint8)
    scale = draw(OUTS, COLUMNS // group).abs() / 20
    zeros = {
        "none": None,
        "whole": torch.randint(0, 1 << bits, scale.shape, dtype=torch.uint8, device=device),
        "broken": (draw(*scale.shape) + 8).to(device),
    }
    order = torch.randperm(COLUMNS, device=device) if ordered else None
    weight = IntWeight.pack(made.to(device), scale.to(device), zeros[zero], bits, order)
    return replace(weight, scale=weight.scale.to(torch.float16))


def assert_near(found: Tensor, expected: Tensor) -> None:
    tolerance = 2e-5 if found.dtype == torch.float32 else 3e-3
    error = (found.float() - expected.float()).abs().max() / expected.float().abs().max()
    assert found.dtype == expected.dtype
    assert float(error) < tolerance


@pytest.fixture(autouse=True)
def _interpreter_rounds_inputs_in_pytorch(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's interpreter rounds 7.9 to 4 in FP8: it drops the carry into the exponent."""
    if device.type == "cpu":
        monkeypatch.setattr(fp8_linear_triton, "quantise_rows", fp8_linear_ref.quantise_rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["tensor", "row", "block", "block, plain input", "block a row"])
def test_fp8_products_equal_the_reference(
    kind: str, dtype: torch.dtype, device: torch.device
) -> None:
    weight = fp8_weight(kind, device)
    x, bias = draw(5, COLUMNS, seed=2).to(device, dtype), draw(OUTS, seed=3).to(device, dtype)
    expected = fp8_linear(x, weight, bias, backend="torch")
    assert_near(fp8_linear_triton.fp8_linear(x, weight, bias, TILE), expected)
    split = replace(TILE, splits=3)
    assert_near(fp8_linear_triton.fp8_linear(x, weight, bias, split), expected)
    assert not counters_of(x.device).any()


@pytest.mark.parametrize("kind", ["tensor", "row", "block"])
def test_inputs_are_rounded_alike(kind: str, device: torch.device) -> None:
    form = fp8_weight(kind, device).input
    assert form is not None
    x = (3 * draw(4, COLUMNS)).to(device)
    found, expected = quantise(x, form), fp8_linear_ref.quantise_rows(x, form)
    torch.testing.assert_close(found[1], expected[1])
    mantissa, _ = expected[0].float().frexp()
    is_told = mantissa.abs() != 0.5 if device.type == "cpu" else mantissa.abs() < 2
    different = found[0].view(torch.uint8) != expected[0].view(torch.uint8)
    assert float(is_told.float().mean()) > 0.7
    assert float((different & is_told).float().mean()) < 0.01  # a division may round otherwise


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "zero"), [(4, "none"), (4, "whole"), (4, "broken"), (8, "whole")])
def test_int_products_equal_the_reference(
    bits: int, zero: str, dtype: torch.dtype, device: torch.device
) -> None:
    weight = int_weight(bits, zero, device, ordered=zero == "whole")
    x, bias = draw(5, COLUMNS, seed=2).to(device, dtype), draw(OUTS, seed=3).to(device, dtype)
    expected = int_linear(x, weight, bias, backend="torch")
    assert_near(int_linear_triton.int_linear(x, weight, bias, TILE), expected)
    split = replace(TILE, splits=3)
    assert_near(int_linear_triton.int_linear(x, weight, bias, split), expected)
    assert not counters_of(x.device).any()


@pytest.mark.parametrize(
    ("bits", "zero", "group"), [(4, "broken", 32), (8, "broken", 32), (8, "none", 16)]
)
def test_products_with_scales_as_gguf_has_them_equal_the_reference(
    bits: int, zero: str, group: int, device: torch.device
) -> None:
    """Float32, one for 32 columns, or for 16 (Q6_K)."""
    made = int_weight(bits, zero, device, group=group)
    weight = replace(made, scale=made.scale.float())
    x = draw(5, COLUMNS, seed=2).to(device)
    expected = int_linear(x, weight, None, backend="torch")
    assert_near(int_linear_triton.int_linear(x, weight, None, TILE), expected)
    found = dequantise_triton.dequantise(weight, torch.float32)
    torch.testing.assert_close(found, weight.dequantised())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["tensor", "row", "block", "block, plain input"])
def test_many_rows_are_multiplied_as_their_codes_give_them(
    kind: str, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes that stand beside the rows are taken, and widened to the same bits as any."""
    monkeypatch.setattr(fp8_linear_form, "use_triton", lambda backend, x: True)
    monkeypatch.setattr(fp8_linear_cuda, "takes", lambda x, weight: False)
    monkeypatch.setattr(fp8_linear_form, "MAX_FEW_ROWS", 2)
    monkeypatch.setattr(fp8_linear_form, "MAX_ROWS", 4)
    weight = fp8_weight(kind, device)
    x = draw(5, COLUMNS, seed=2).to(device, dtype)
    rounded = x
    if weight.input is not None:
        codes, scale = fp8_linear_triton.quantise_rows(x, weight.input)
        groups = codes.float().view(5, scale.shape[1], -1) * scale[:, :, None]
        rounded = groups.view(x.shape).to(dtype)
    expected = torch.nn.functional.linear(rounded, weight.dequantised().to(dtype))
    assert torch.equal(fp8_linear(x, weight), expected)
    if rounding_of(weight.input, COLUMNS) != NOT_ROUNDED:
        other = put_beside(torch.zeros_like(x), codes, scale)
        assert torch.equal(fp8_linear(other, weight), expected)


@pytest.mark.parametrize("rows", [1, 17, 70])
def test_a_row_does_not_depend_on_the_rows_beside_it(rows: int, device: torch.device) -> None:
    x = draw(rows, COLUMNS, seed=4).to(device)
    for splits in (1, 3):
        tile = replace(TILE, splits=splits)
        fp8, four = fp8_weight("row", device), int_weight(4, "whole", device)
        for product, weight in (
            (fp8_linear_triton.fp8_linear, fp8),
            (int_linear_triton.int_linear, four),
        ):
            whole = product(x, weight, None, tile)
            for row in {0, rows - 1}:
                assert torch.equal(whole[row], product(x[row : row + 1], weight, None, tile)[0])


def test_whole_weights_are_dequantised(device: torch.device) -> None:
    for fp8 in ("tensor", "row", "block", "block a row"):
        weight = fp8_weight(fp8, device)
        found = dequantise_triton.dequantise(weight, torch.float32)
        torch.testing.assert_close(found, weight.dequantised())
    for bits, zero in ((4, "none"), (4, "whole"), (4, "broken"), (8, "whole")):
        four = int_weight(bits, zero, device)
        found = dequantise_triton.dequantise(four, torch.float32)
        torch.testing.assert_close(found, four.dequantised())


def test_rows_of_several_programs_are_dequantised(device: torch.device) -> None:
    codes = torch.randint(0, 16, (3, 4224), dtype=torch.uint8, device=device)
    scale = draw(3, 33).to(device, torch.float16)
    weight = IntWeight.pack(codes, scale, None, 4)
    found = dequantise_triton.dequantise(weight, torch.float16)
    assert torch.equal(found, weight.dequantised().to(torch.float16))


@pytest.mark.parametrize("bits", [4, 8])
def test_columns_that_products_do_not_take_are_not_cut_out(bits: int) -> None:
    """Products go by 32 columns of one scale, and would leave the rest out."""
    codes = torch.randint(0, 1 << bits, (8, 192)).to(torch.uint8)
    whole = IntWeight.pack(codes, torch.ones(8, 1), None, bits)
    assert whole.narrow(1, 0, 48) is None
    assert whole.narrow(1, 16, 96) is None
    part = whole.narrow(1, 64, 96)
    assert part is not None
    assert torch.equal(part.dequantised(), whole.dequantised()[:, 64:160])


def test_no_rows_cost_nothing(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that share experts run whole forwards of none."""
    for kind in (Fp8Weight, IntWeight):
        monkeypatch.setattr(kind, "dequantised", None)
    x = torch.empty(0, COLUMNS, device=device)
    assert fp8_linear(x, fp8_weight("row", device)).shape == (0, OUTS)
    assert int_linear(x, int_weight(4, "none", device)).shape == (0, OUTS)


@pytest.mark.parametrize("rows", slow_but(["64"], ["1", "64", "128", "256"]))
def test_products_compile_for_hopper(rows: str, triton_cache: Path) -> None:
    names = offline_triton.run("tests.kernels.offline_quantised", triton_cache, rows)
    rounded = ["_quantise_kernel", "_fp8_kernel"]
    assert names == ["_fp8_kernel", *rounded, *["_fp8_codes_kernel"] * 4, "_int_kernel"]
