"""Linear layers for few rows, fused with what comes before and after them in a decoder layer.

A small model decoding a few rows is bound by the number of kernels, not by bytes: one kernel here
replaces norm + GEMM, GEMM + residual addition, or norm + GEMM + gated activation.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from specengine.kernels.cuda import program
from specengine.kernels.dispatch import Backend, has_dependent_launch, use_triton
from specengine.kernels.linear import few_row_ref

# Beyond these, a GEMM of cuBLAS earns more than the saved kernels (benchmarks/results): every
# sixteen rows read all weights, so that rows are few where weights are many.
MAX_ROWS = 128
MAX_WORK = 500_000_000  # rows x weights, of a decoder layer
MAX_PRODUCT = 100_000_000  # rows x weights, of a product by itself
MIN_STREAM = 10_000_000  # weights of a product by itself from which one row is a stream of them
MAX_HIDDEN = 2048
MAX_HIDDEN_OF_ONE_ROW = 8192


def fits(x: Tensor, num_weights: int) -> bool:
    """Whether the fused kernels are the faster choice for a decoder layer of so many weights on x
    [T, H]."""
    rows, hidden = x.shape
    if rows == 1:
        return use_triton("auto", x) and hidden <= MAX_HIDDEN_OF_ONE_ROW
    return rows * num_weights <= MAX_WORK and _can_take(x)


def _pays(x: Tensor, weight: Tensor) -> bool:
    return len(x) * weight.numel() <= MAX_PRODUCT and _can_take(x)


def _is_stream(x: Tensor, weight: Tensor) -> bool:
    """One row and many weights."""
    is_one = len(x) == 1 and x.shape[1] <= MAX_HIDDEN_OF_ONE_ROW
    return is_one and weight.numel() >= MIN_STREAM and use_triton("auto", x)


def _can_take(x: Tensor) -> bool:
    rows, hidden = x.shape
    return 0 < rows <= MAX_ROWS and hidden <= MAX_HIDDEN and _has_tiles(x)


def _has_tiles(x: Tensor) -> bool:
    """Whether the CUDA kernel can take x: half precision, rows of whole 16 bytes, Hopper."""
    is_aligned = x.shape[1] % 8 == 0 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    is_half = x.dtype in (torch.bfloat16, torch.float16)
    return is_half and is_aligned and has_dependent_launch(x) and program.available()


def _module(backend: Backend, x: Tensor) -> ModuleType:
    """One row of a wide layer is faster in Triton: it is a stream of weights, and no product."""
    if backend == "cuda" or (
        backend == "auto" and _has_tiles(x) and (x.shape[0] > 1 or x.shape[1] <= MAX_HIDDEN)
    ):
        from specengine.kernels.linear import few_row_cuda

        return few_row_cuda
    if use_triton(backend, x) and x.shape[0] == 1:
        from specengine.kernels.linear import few_row_triton

        return few_row_triton
    return few_row_ref


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    into: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """x: [T, H], weight: [O, H], bias: [O] or None -> [T, O].

    into: [T, O] of x's dtype, contiguous. The CUDA kernel fills it while the kernel ahead runs; the
    others give a new tensor. The kernel ahead must not signal before x is complete (a product of x
    that waits first does not), and `into` must be allocated before that kernel is launched: else it
    could lie in what that kernel reads or writes.
    """
    if backend == "auto" and _is_stream(x, weight):
        backend = "triton"
    takes_kernel = backend in ("cuda", "triton") or (backend == "auto" and _pays(x, weight))
    module = _module(backend, x) if takes_kernel else few_row_ref
    out: Tensor = module.linear(x, weight, bias, into)
    return out


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

    x: [T, H]; weight: [O, H]; bias: [O] or None -> [T, O] of out_dtype (x's).
    Accumulates in float32. backend "triton" takes one row; "cuda" half precision, H a multiple of
    8, and gives a row the same result whatever other rows there are.
    """
    module = _module(backend, x)
    out: Tensor = module.norm_linear(x, norm_weight, eps, weight, bias, out_dtype)
    return out


def norm_gated_linear(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, *, backend: Backend = "auto"
) -> Tensor:
    """``silu_and_mul(linear(rms_norm(x, norm_weight, eps), weight))``.

    x: [T, H]; weight: [2 I, H], gate rows before up rows -> [T, I]. The products are rounded to
    x's dtype before the activation, as the unfused operations round them.
    """
    out: Tensor = _module(backend, x).norm_gated_linear(x, norm_weight, eps, weight)
    return out


def linear_add(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    bias: Tensor | None = None,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """``residual + linear(x, weight, bias)``, the product rounded to the dtype before the addition.

    x: [T, I]; weight: [H, I]; bias: [H] or None; residual: [T, H], not modified -> [T, H].
    """
    out: Tensor = _module(backend, x).linear_add(x, weight, residual, bias)
    return out
