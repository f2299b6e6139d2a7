"""Linear layers for few rows, fused with what stands before and after them in a decoder layer.

A small model decoding a few rows is bound by the number of kernels, not by bytes: one kernel here
replaces norm + GEMM, GEMM + residual addition, or norm + GEMM + gated activation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.kernels import few_row_ref
from specengine.kernels.dispatch import Backend, use_triton

# Beyond these, a GEMM of cuBLAS earns more than the saved kernels (benchmarks/results).
MAX_ROWS = 16
MAX_HIDDEN = 2048


def fits(x: Tensor) -> bool:
    """Whether the fused kernels are the faster choice for x [T, H]."""
    rows, hidden = x.shape
    return x.is_cuda and 0 < rows <= MAX_ROWS and hidden <= MAX_HIDDEN and use_triton("auto", x)


def norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """``linear(rms_norm(x, norm_weight, eps), weight, bias)``.

    x: [T, H], T <= MAX_ROWS; weight: [O, H]; bias: [O] or None -> [T, O] of out_dtype (x's).
    Accumulates in float32; the normed rows are rounded to x's dtype as rms_norm rounds them.
    """
    if use_triton(backend, x):
        from specengine.kernels import few_row_triton

        return few_row_triton.norm_linear(x, norm_weight, eps, weight, bias, out_dtype)
    return few_row_ref.norm_linear(x, norm_weight, eps, weight, bias, out_dtype)


def norm_gated_linear(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, *, backend: Backend = "auto"
) -> Tensor:
    """``silu_and_mul(linear(rms_norm(x, norm_weight, eps), weight))``.

    x: [T, H]; weight: [2 I, H], gate rows before up rows -> [T, I]. The products are rounded to
    x's dtype before the activation, as the unfused operations round them.
    """
    if use_triton(backend, x):
        from specengine.kernels import few_row_triton

        return few_row_triton.norm_gated_linear(x, norm_weight, eps, weight)
    return few_row_ref.norm_gated_linear(x, norm_weight, eps, weight)


def linear_add(x: Tensor, weight: Tensor, residual: Tensor, *, backend: Backend = "auto") -> Tensor:
    """``residual + linear(x, weight)``, the product rounded to the dtype before the addition.

    x: [T, I]; weight: [H, I]; residual: [T, H], not modified -> [T, H].
    """
    if use_triton(backend, x):
        from specengine.kernels import few_row_triton

        return few_row_triton.linear_add(x, weight, residual)
    return few_row_ref.linear_add(x, weight, residual)
