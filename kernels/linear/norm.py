"""Root-mean-square norm (Zhang and Sennrich 2019), alone and with the residual addition."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specengine.kernels.custom_op import CustomOp
from specengine.kernels.dispatch import Backend, use_triton
from specengine.kernels.linear import norm_ref, rounded_cuda
from specengine.kernels.linear.quantised import Fp8Input
from specengine.kernels.linear.rounded import NOT_ROUNDED, rounding_of
from specengine.kernels.native import ops as native


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    into: Fp8Input | None = None,
    awaited: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """For each row x of the last dimension::

        normed = x / sqrt(mean(x * x) + eps)          # in float32
        out = round_to_weight_dtype(normed) * weight  # rounded to x's dtype

    x: [..., H], the last dimension contiguous, at most three dimensions; weight: [H] of x's dtype,
    as of Llama, or float32, as of Gemma, which rounds once. Returns a contiguous tensor of x's
    shape. Any device; Triton on CUDA. into: the form to which the rows' reader rounds them, [T, H];
    where a kernel can, it does so here (rounded.py), the one in CUDA C++ with Triton's bits.
    awaited: the kernel behind this one reads the rows, before its own wait nothing but weights,
    and lets nothing start before that wait has ended. Then it may start at once.
    """
    if x.dim() == 2 and (awaited or into is not None):
        if rounded_cuda.takes_norm(x, x, weight, into, backend):
            return rounded_cuda.rms_norm(x, weight, eps)
        rounds = _rounds(x, into, backend)
        if rounds or (awaited and use_triton(backend, x)):
            from specengine.kernels.linear import norm_triton

            return norm_triton.rms_norm(x, weight, eps, rounds, awaited)
    out: Tensor = _rms_norm(x, weight, eps, backend=backend)
    return out


def fused_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    into: Fp8Input | None = None,
    awaited: bool = False,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """``total = x + residual`` (rounded to the dtype), then ``(rms_norm(total), total)``.

    x, residual: [T, H] of one dtype, rows contiguous; neither is modified. Any device; Triton on
    CUDA, where both results take one kernel. into, awaited: as of rms_norm, of the first result.
    """
    if awaited or into is not None:
        if rounded_cuda.takes_norm(x, residual, weight, into, backend):
            return rounded_cuda.fused_add_rms_norm(x, residual, weight, eps)
        rounds = _rounds(x, into, backend)
        if rounds or (awaited and use_triton(backend, x)):
            from specengine.kernels.linear import norm_triton

            return norm_triton.fused_add_rms_norm(x, residual, weight, eps, rounds, awaited)
    normed, total = _fused_add_rms_norm(x, residual, weight, eps, backend=backend)
    return normed, total


def sum_add_rms_norm(
    parts: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    into: Fp8Input | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """``fused_add_rms_norm(round_to_dtype(parts.sum(0)), residual)``, the dtype being residual's.

    parts: float32 [P, T, H], contiguous, of products and experts; residual: [T, H], rows
    contiguous; neither is modified. Any device; Triton on CUDA, where it is one kernel that reads
    residual and weight before the kernel ahead has ended: that one must write neither, nor let this
    one start before its own wait has ended. What gives parts (cuBLAS, FP8 products, experts,
    weigh_shared) does not. This one lets the next start at once: before its wait that one may read
    what was complete two before. into: as of rms_norm, of the first result.
    """
    if rounds := _rounds(residual, into, backend):
        from specengine.kernels.linear import norm_triton

        return norm_triton.sum_add_rms_norm(parts, residual, weight, eps, rounds)
    normed, total = _sum_add_rms_norm(parts, residual, weight, eps, backend=backend)
    return normed, total


def _rounds(x: Tensor, into: Fp8Input | None, backend: Backend) -> int:
    """A traced norm has no `into`: which kernels a device has is not asked within a trace."""
    found = rounding_of(into, x.shape[-1])
    return found if found and use_triton(backend, x) else NOT_ROUNDED


def _like_x(x: Tensor, *_: object) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


class _RmsNorm(CustomOp):
    schema = "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor"
    torch = staticmethod(norm_ref.rms_norm)
    native = staticmethod(native.rms_norm)
    fake = staticmethod(_like_x)

    @staticmethod
    def triton(*given: Any) -> Tensor:
        from specengine.kernels.linear import norm_triton

        return norm_triton.rms_norm(*given)

    @staticmethod
    def takes_native(x: Tensor, weight: Tensor, eps: float) -> bool:
        return x.dim() == 2 and weight.dtype == x.dtype


class _FusedAddRmsNorm(CustomOp):
    schema = (
        "fused_add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps)"
        " -> (Tensor, Tensor)"
    )
    torch = staticmethod(norm_ref.fused_add_rms_norm)
    native = staticmethod(native.fused_add_rms_norm)

    @staticmethod
    def fake(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        return _like_x(x), _like_x(x)

    @staticmethod
    def triton(*given: Any) -> tuple[Tensor, Tensor]:
        from specengine.kernels.linear import norm_triton

        return norm_triton.fused_add_rms_norm(*given)

    @staticmethod
    def takes_native(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> bool:
        return weight.dtype == x.dtype and residual.stride(-1) == 1


class _SumAddRmsNorm(CustomOp):
    torch = staticmethod(norm_ref.sum_add_rms_norm)

    @staticmethod
    def triton(*given: Any) -> tuple[Tensor, Tensor]:
        from specengine.kernels.linear import norm_triton

        return norm_triton.sum_add_rms_norm(*given)


_rms_norm, _fused_add_rms_norm, _sum_add_rms_norm = _RmsNorm(), _FusedAddRmsNorm(), _SumAddRmsNorm()
