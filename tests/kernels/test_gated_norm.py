from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specengine.kernels.linear import fp8_linear_triton
from specengine.kernels.linear.gated_norm import gated_norm
from specengine.kernels.linear.quantised import Fp8Input
from specengine.kernels.linear.rounded import found_beside

EPS = 1e-5
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, id="bfloat16")]
# Rows, heads, size of a head.
SHAPES = [(1, 4, 16), (5, 3, 24), (2, 1, 80), (17, 2, 8)]
Given = tuple[Tensor, Tensor, Tensor]


def draw(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Given:
    """The gate is a part of wider rows, as the projection leaves it."""
    made = torch.Generator().manual_seed(0)
    rows, heads, size = shape
    x = 3 * torch.randn(shape, generator=made)
    wide = (2 * torch.randn(rows, 6 + heads * size, generator=made)).to(device, dtype)
    weight = (1 + 0.2 * torch.randn(size, generator=made)).to(device, dtype)
    return x.to(device), wide[:, 6:].view(shape), weight


@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_equals_qwen3_next_bit_by_bit(dtype: torch.dtype) -> None:
    x, gate, weight = draw((5, 3, 24), dtype, torch.device("cpu"))
    normed = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)).to(dtype)
    expected = (weight * normed * F.silu(gate.to(torch.float32))).to(dtype)
    found = gated_norm(x, gate, weight, EPS)
    assert torch.equal(found, expected.view(5, 72))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_triton_equals_reference(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    given = draw(shape, dtype, device)
    found = gated_norm(*given, EPS, backend="triton")
    expected = gated_norm(*given, EPS, backend="torch")
    assert found.is_contiguous()
    tolerance = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("heads", "size", "group"),
    [(13, 128, 128), (13, 128, 64), (20, 64, 256), (36, 128, 512), (32, 128, 2048)],
)
def test_rows_of_several_programs_are_rounded_group_by_group(
    heads: int, size: int, group: int, device: torch.device
) -> None:
    """Heads that programs do not divide, groups of a part of a head, of several, and larger than
    a program."""
    form, given = Fp8Input(group=group), draw((3, heads, size), torch.float32, device)
    found = gated_norm(*given, EPS, into=form, backend="triton")
    expected = gated_norm(*given, EPS, backend="torch")
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)
    kept = found_beside(found, form)
    assert kept is not None
    codes, scale = fp8_linear_triton.quantise_rows(found.clone(), form)
    assert torch.equal(kept[0].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(kept[1], scale)


def test_gains_in_float32_multiply_in_float32(device: torch.device) -> None:
    x, gate, weight = draw((3, 2, 32), torch.float16, device)
    weight = weight.float() + 1e-4
    expected = gated_norm(x, gate, weight, EPS, backend="torch")
    found = gated_norm(x, gate, weight, EPS, backend="triton")
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("into", [None, Fp8Input()])
def test_bits_of_a_row_do_not_depend_on_other_rows(
    device: torch.device, into: Fp8Input | None
) -> None:
    x, gate, weight = draw((7, 3, 24), torch.float16, device)
    together = gated_norm(x, gate, weight, EPS, into=into, backend="triton")
    for row in range(7):
        one = slice(row, row + 1)
        alone = gated_norm(x[one], gate[one], weight, EPS, into=into, backend="triton")
        assert torch.equal(alone, together[one])


def test_what_the_kernel_does_not_take_is_computed_by_the_reference(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specengine.kernels.linear.gated_norm_triton.gated_norm", None)
    x, gate, weight = draw((2, 3, 24), torch.float32, device)
    across = x.transpose(1, 2).contiguous().transpose(1, 2)
    expected = gated_norm(x, gate, weight, EPS, backend="torch")
    found = gated_norm(across, gate, weight, EPS, into=Fp8Input(), backend="triton")
    torch.testing.assert_close(found, expected)
    assert found_beside(found, Fp8Input()) is None
    wide = torch.ones(1, 1025, 32, device=device)
    assert gated_norm(wide, wide, wide[0, 0], EPS, backend="triton").shape == (1, 32800)


def test_zero_rows(device: torch.device) -> None:
    empty = torch.empty(0, 2, 16, device=device)
    weight = torch.ones(16, device=device)
    assert gated_norm(empty, empty, weight, EPS, backend="triton").shape == (0, 32)
