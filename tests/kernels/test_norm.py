from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specengine.kernels.linear.norm import fused_add_rms_norm, rms_norm, sum_add_rms_norm

EPS = 1e-5


def transformers_norm(x: Tensor, weight: Tensor) -> Tensor:
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * normed.to(x.dtype)


def weight_of(hidden: int, dtype: torch.dtype) -> Tensor:
    return (1 + 0.2 * torch.randn(hidden)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_reference_equals_transformers_bit_by_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual = (3 * torch.randn(2, 5, 96)).to(dtype)
    weight = weight_of(96, dtype)
    assert torch.equal(rms_norm(x, weight, EPS, backend="torch"), transformers_norm(x, weight))
    normed, total = fused_add_rms_norm(x, residual, weight, EPS, backend="torch")
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, transformers_norm(x + residual, weight))


def test_large_half_precision_values_do_not_overflow() -> None:
    x = torch.full((1, 8), 6e4, dtype=torch.float16)
    out = rms_norm(x, torch.ones(8, dtype=torch.float16), EPS)
    assert torch.allclose(out.float(), torch.ones(1, 8), atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_triton_equals_reference(device: torch.device, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x, residual = (3 * torch.randn(2, 4, 80)).to(dtype).to(device)
    weight = weight_of(80, dtype).to(device)
    tolerance = 1e-6 if dtype is torch.float32 else 4e-3
    torch.testing.assert_close(
        rms_norm(x, weight, EPS, backend="triton"),
        rms_norm(x, weight, EPS, backend="torch"),
        rtol=tolerance,
        atol=tolerance,
    )
    normed, total = fused_add_rms_norm(x, residual, weight, EPS, backend="triton")
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(
        normed, rms_norm(total, weight, EPS, backend="torch"), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_parts_are_added_up_and_rounded_once(
    device: torch.device, count: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(4)
    parts = 3 * torch.randn(count, 5, 80, device=device)
    residual = torch.randn(5, 160, device=device).to(dtype)[:, :80]
    weight = weight_of(80, dtype).to(device)
    whole = parts.double().sum(0).float().to(dtype)
    expected = fused_add_rms_norm(whole, residual, weight, EPS, backend="torch")
    for backend in ("torch", "triton"):
        found = sum_add_rms_norm(parts, residual, weight, EPS, backend=backend)  # type: ignore[arg-type]
        tolerance = 1e-5 if dtype is torch.float32 else 4e-3
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    assert sum_add_rms_norm(parts[:, :0], residual[:0], weight, EPS)[0].shape == (0, 80)


def test_triton_takes_strided_heads(device: torch.device) -> None:
    """q and k of Qwen3 are slices of one qkv tensor, and normed head by head."""
    torch.manual_seed(2)
    qkv = torch.randn(3, 6 * 16, device=device)
    k = qkv[:, 2 * 16 : 4 * 16].view(3, 2, 16)
    weight = weight_of(16, torch.float32).to(device)
    out = rms_norm(k, weight, EPS, backend="triton")
    torch.testing.assert_close(out, rms_norm(k, weight, EPS, backend="torch"))


def test_zero_rows(device: torch.device) -> None:
    empty = torch.empty(0, 16, device=device)
    weight = torch.ones(16, device=device)
    assert rms_norm(empty, weight, EPS, backend="triton").shape == (0, 16)
    normed, total = fused_add_rms_norm(empty, empty, weight, EPS, backend="triton")
    assert normed.shape == total.shape == (0, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gains_in_float32_are_rounded_once(dtype: torch.dtype, device: torch.device) -> None:
    """As Gemma has them: x * (1 + weight) in float32. On a GPU PyTorch sums in another order than
    the test, so that a hundredth of the values may round to the neighbour. Rounding before the gain
    too moves a third of them."""
    torch.manual_seed(0)
    x, residual = (3 * torch.randn(2, 5, 96)).to(dtype).to(device)
    gain = (1 + 0.2 * torch.randn(96)).to(device)
    total = x + residual
    x32 = total.float()
    expected = (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + EPS) * gain).to(dtype)
    for backend in ("torch", "auto"):
        assert_rounded_alike(rms_norm(total, gain, EPS, backend=backend), expected)
        normed, _ = fused_add_rms_norm(x, residual, gain, EPS, backend=backend)
        assert_rounded_alike(normed, expected)
    if dtype is not torch.bfloat16:  # which the interpreter rounds otherwise
        tolerance = 1e-6 if dtype is torch.float32 else 1e-3
        normed, _ = fused_add_rms_norm(x, residual, gain, EPS, backend="triton")
        torch.testing.assert_close(normed, expected, rtol=tolerance, atol=tolerance)


def assert_rounded_alike(found: Tensor, expected: Tensor) -> None:
    """In float32 sums of squares may be added in another order, which depends on the processor."""
    if expected.dtype == torch.float32:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    elif expected.is_cuda:
        assert float((found != expected).float().mean()) < 0.01
        torch.testing.assert_close(found, expected)
    else:
        assert torch.equal(found, expected)


def test_gains_that_are_rounded_twice_would_be_seen() -> None:
    torch.manual_seed(0)
    x = (3 * torch.randn(5, 96)).half()
    gain = 1 + 0.2 * torch.randn(96)
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)
    once, twice = (normed * gain).half(), (normed.half() * gain).half()
    assert float((once != twice).float().mean()) > 0.1
