from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specengine.kernels.activation import silu_and_mul
from specengine.kernels.few_row import linear_add, norm_gated_linear, norm_linear
from specengine.kernels.norm import rms_norm

EPS = 1e-5
ROWS = [1, 3, 16]
HIDDEN, OUTS = 72, 40


def draw(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=5e-5, atol=5e-5)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
def test_norm_linear(device: torch.device, rows: int, with_bias: bool) -> None:
    x, gain, weight = draw(device, rows, HIDDEN), draw(device, HIDDEN), draw(device, OUTS, HIDDEN)
    bias = draw(device, OUTS) if with_bias else None
    expected = F.linear(rms_norm(x, gain, EPS, backend="torch"), weight, bias)
    close(norm_linear(x, gain, EPS, weight, bias, backend="triton"), expected)
    close(norm_linear(x, gain, EPS, weight, bias, backend="torch"), expected)


@pytest.mark.parametrize("rows", ROWS)
def test_norm_gated_linear(device: torch.device, rows: int) -> None:
    x, gain = draw(device, rows, HIDDEN), draw(device, HIDDEN)
    weight = draw(device, 2 * OUTS, HIDDEN)
    normed = rms_norm(x, gain, EPS, backend="torch")
    expected = silu_and_mul(F.linear(normed, weight), backend="torch")
    close(norm_gated_linear(x, gain, EPS, weight, backend="triton"), expected)
    close(norm_gated_linear(x, gain, EPS, weight, backend="torch"), expected)


@pytest.mark.parametrize("rows", ROWS)
def test_linear_add(device: torch.device, rows: int) -> None:
    x, weight = draw(device, rows, HIDDEN), draw(device, OUTS, HIDDEN)
    residual = draw(device, rows, OUTS)
    before = residual.clone()
    close(linear_add(x, weight, residual, backend="triton"), F.linear(x, weight) + residual)
    close(linear_add(x, weight, residual, backend="torch"), F.linear(x, weight) + residual)
    assert torch.equal(residual, before)


def test_rows_of_a_wider_tensor(device: torch.device) -> None:
    wide = draw(device, 3, HIDDEN + 8)
    x, weight, residual = wide[:, 8:], draw(device, OUTS, HIDDEN), draw(device, 3, OUTS)
    close(linear_add(x, weight, residual, backend="triton"), F.linear(x, weight) + residual)


def test_float_logits_from_half_rows(device: torch.device) -> None:
    x = draw(device, 2, HIDDEN).half()
    gain, weight = draw(device, HIDDEN).half(), draw(device, OUTS, HIDDEN).half()
    out = norm_linear(x, gain, EPS, weight, out_dtype=torch.float32, backend="triton")
    assert out.dtype is torch.float32
    expected = rms_norm(x, gain, EPS, backend="torch").float() @ weight.float().T
    torch.testing.assert_close(out, expected, rtol=2e-3, atol=2e-3)
