"""Products of a few rows with FP8 codes on both sides in CUDA C++, on a GPU or on a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specengine.kernels.linear import fp8_linear_cuda
from specengine.kernels.linear.fp8_codes import BLOCK
from specengine.kernels.linear.fp8_linear import fp8_linear, quantise_rows
from specengine.kernels.linear.fp8_linear_cuda import RowsTile, computes, takes
from specengine.kernels.linear.quantised import Fp8Input, Fp8Weight
from tests.kernels.cuda_places import PLACES, placed

OUTS = 136  # that no block divides


@pytest.fixture(autouse=True, params=PLACES)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    return placed(request, monkeypatch, fp8_linear_cuda)


def draw(
    place: torch.device, rows: int, columns: int, is_by_block: bool = False
) -> tuple[Tensor, Fp8Weight]:
    weight = Fp8Weight.of(torch.randn(OUTS, columns, device=place))
    if is_by_block:
        scale = torch.rand(-(-OUTS // BLOCK), columns // BLOCK, device=place)
        weight = replace(
            weight, scale=scale, rows=BLOCK, columns=BLOCK, input=Fp8Input(group=BLOCK)
        )
    return torch.randn(rows, columns, device=place).bfloat16(), weight


def expected(x: Tensor, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
    assert weight.input is not None
    codes, scale = quantise_rows(x, weight.input)
    rows = codes.double().view(len(x), scale.shape[1], -1) * scale.double()[:, :, None]
    exact = rows.view(x.shape) @ weight.dequantised().double().T
    return exact if bias is None else exact + bias


@pytest.mark.parametrize(
    ("rows", "columns", "is_by_block", "tile"),
    [
        (1, 2576, False, RowsTile(1, 3)),
        (5, 2064, False, RowsTile(2, 4)),
        (8, 1008, False, RowsTile(4, 2)),
        (1, 2688, True, RowsTile(1, 3)),
        (8, 1664, True, RowsTile(4, 2)),
    ],
)
def test_rows_equal_the_reference(
    rows: int, columns: int, is_by_block: bool, tile: RowsTile, place: torch.device
) -> None:
    """Depths that no step divides, and more steps than shared memory holds."""
    x, weight = draw(place, rows, columns, is_by_block)
    assert weight.input is not None
    bias = torch.randn(OUTS, device=place).bfloat16() if rows > 1 else None
    codes, scale = quantise_rows(x, weight.input)
    found = fp8_linear_cuda.fp8_linear(codes, scale, weight, bias, x.dtype, tile)
    wanted = expected(x, weight, bias)
    assert (found - wanted).abs().max() < 0.004 * wanted.abs().max()
    alone = fp8_linear_cuda.fp8_linear(codes[-1:], scale[-1:], weight, bias, x.dtype, tile)
    assert torch.equal(alone[0], found[-1])


def test_one_scale_of_the_weight_and_one_published_for_the_rows(place: torch.device) -> None:
    x, weight = draw(place, 3, 512)
    published = torch.tensor([0.02], device=place)
    weight = replace(weight, scale=weight.scale[:1], rows=OUTS, input=Fp8Input(scale=published))
    found = fp8_linear(x, weight, backend="cuda")
    codes = (x.float() / published).clamp(-448, 448).to(weight.codes.dtype)
    wanted = (codes.double() * published) @ weight.dequantised().double().T
    assert (found - wanted).abs().max() < 0.004 * wanted.abs().max()


def test_what_the_kernel_does_not_compute_is_refused() -> None:
    x, weight = draw(torch.device("cpu"), 1, 256)
    assert computes(x, weight)
    assert not takes(x, weight)  # no GPU
    assert not computes(x.float(), weight)
    assert not computes(x, replace(weight, input=None))
    assert not computes(x, replace(weight, input=Fp8Input(group=128)))
    assert not computes(x, replace(weight, columns=128))
    _, blocks = draw(torch.device("cpu"), 1, 256, is_by_block=True)
    assert computes(x, blocks)
    assert not computes(x, replace(blocks, columns=64, input=Fp8Input(group=64)))
    assert not computes(x, blocks.by_row())
    assert not computes(x, replace(blocks, rows=64)), "of which Triton's tiles have other bits"
    assert not computes(x[:, :128], replace(blocks, codes=blocks.codes[:, :128].contiguous()))
    narrow = weight.narrow(1, 0, 248)
    assert narrow is not None
    assert not computes(x, narrow)
