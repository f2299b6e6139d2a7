"""Root-mean-square norm (Zhang and Sennrich 2019), alone and with the residual addition."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.kernels.dispatch import Backend, use_native, use_triton
from specengine.kernels.linear import norm_ref
from specengine.kernels.native import ops as native
from specengine.kernels.opaque import is_traced, opaque


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, backend: Backend = "auto") -> Tensor:
    """For each row x of the last dimension::

        normed = x / sqrt(mean(x * x) + eps)          # in float32
        out = round_to_weight_dtype(normed) * weight  # rounded to x's dtype

    x: [..., H], the last dimension contiguous, at most three dimensions; weight: [H] of x's dtype,
    as of Llama, or float32, as of Gemma, which rounds once. Returns a contiguous tensor of x's
    shape. Any device; Triton on CUDA.
    """
    if is_traced():
        traced: Tensor = _rms_norm(x, weight, eps)
        return traced
    if use_triton(backend, x):
        from specengine.kernels.linear import norm_triton

        return norm_triton.rms_norm(x, weight, eps)
    if x.dim() == 2 and weight.dtype == x.dtype and use_native(backend, x):
        return native.rms_norm(x, weight, eps)
    return norm_ref.rms_norm(x, weight, eps)


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """``total = x + residual`` (rounded to the dtype), then ``(rms_norm(total), total)``.

    x, residual: [T, H] of one dtype, rows contiguous; neither is modified. Any device; Triton on
    CUDA, where both results take one kernel.
    """
    if is_traced():
        normed, total = _fused_add_rms_norm(x, residual, weight, eps)
        return normed, total
    if use_triton(backend, x):
        from specengine.kernels.linear import norm_triton

        return norm_triton.fused_add_rms_norm(x, residual, weight, eps)
    is_native = weight.dtype == x.dtype and residual.stride(-1) == 1
    if is_native and use_native(backend, x):
        return native.fused_add_rms_norm(x, residual, weight, eps)
    return norm_ref.fused_add_rms_norm(x, residual, weight, eps)


def sum_add_rms_norm(
    parts: Tensor, residual: Tensor, weight: Tensor, eps: float, *, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """``fused_add_rms_norm(round_to_dtype(parts.sum(0)), residual)``, the dtype being residual's.

    parts: float32 [P, T, H], contiguous, of a product (split_linear); residual: [T, H], rows
    contiguous; neither is modified. Any device; Triton on CUDA, where it is one kernel that reads
    residual and weight before the kernel ahead has ended: that one must write neither, nor signal
    its end early, as cuBLAS and this kernel do not.
    """
    if use_triton(backend, parts):
        from specengine.kernels.linear import norm_triton

        return norm_triton.sum_add_rms_norm(parts, residual, weight, eps)
    return norm_ref.sum_add_rms_norm(parts, residual, weight, eps)


def _like_x(x: Tensor, *_: object) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


_rms_norm = opaque(
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", rms_norm, _like_x, norm_ref.rms_norm
)
_fused_add_rms_norm = opaque(
    "fused_add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    fused_add_rms_norm,
    lambda x, *_: (_like_x(x), _like_x(x)),
    norm_ref.fused_add_rms_norm,
)
