"""A linear layer whose weight has 4 or 8 bits, and whose input has not."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from specengine.kernels.cuda import program
from specengine.kernels.dispatch import Backend, has_dependent_launch, use_triton
from specengine.kernels.linear import int_linear_cuda, int_linear_ref
from specengine.kernels.linear.activation import act_and_mul
from specengine.kernels.linear.linear_format import LinearFormat
from specengine.kernels.linear.quantised import IntWeight, join_int

MAX_ROWS = 128  # up to which passes over packed weights cost less than a whole one of 16 bits


def int_linear(
    x: Tensor, weight: IntWeight, bias: Tensor | None = None, *, backend: Backend = "auto"
) -> Tensor:
    """``x @ w.T + bias`` with w as `weight` states it.

    x: [T, K], bias: [N] or None -> [T, N] of x's dtype. Sums are float32. Any device. On a GPU, up
    to MAX_ROWS rows are multiplied in CUDA C++ (Hopper, 4 bits, half precision; up to 256 rows of
    many outputs) or in Triton, more with a weight that is dequantised for it.
    """
    if not len(x):  # of an idle rank: the weight is not looked at
        return x.new_empty(0, weight.shape[0])
    x = x.contiguous()
    if backend == "cuda" or (backend == "auto" and _takes_cuda(x, weight)):
        return int_linear_cuda.int_linear(x, weight, bias)
    if not use_triton(backend, x):
        return int_linear_ref.int_linear(x, weight, bias)
    from specengine.kernels.linear import dequantise_triton, int_linear_triton

    if backend == "auto" and len(x) > MAX_ROWS:
        x = x if weight.order is None else x.index_select(1, weight.order)
        return F.linear(x, dequantise_triton.dequantise(weight, x.dtype), bias)
    return int_linear_triton.int_linear(x, weight, bias)


def gated_int_linear(
    x: Tensor,
    weight: IntWeight,
    activation: str,
    bias: Tensor | None = None,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """``act_and_mul(int_linear(x, weight, bias), activation)``, and its bits.

    x: [T, K]; weight: [2 I, K], rows of gate before those of up; bias: [2 I] or None -> [T, I] of
    x's dtype. activation: a key of activation.ACTIVATIONS. Any device. One kernel on a GPU, where
    the product is multiplied in CUDA C++ and the activation is silu.
    """
    if len(x) and activation == "silu" and int_linear_cuda.takes_gated(weight):
        x = x.contiguous()
        if backend == "cuda" or (backend == "auto" and _takes_cuda(x, weight)):
            return int_linear_cuda.int_linear(x, weight, bias, gated=True)
    return act_and_mul(int_linear(x, weight, bias, backend=backend), activation, backend=backend)


def waits(weight: IntWeight) -> bool:
    """Whether a norm right ahead of int_linear or gated_int_linear may call its rows awaited
    (norm.rms_norm), whatever their number. So it may of every kernel that is here the first one to
    run: those for 4 bits, in CUDA C++ and in Triton, and what dequantises, which starts late. Of 8
    bits Triton's fetches nothing ahead, and nothing was measured."""
    return weight.bits == 4 and weight.order is None


def _takes_cuda(x: Tensor, weight: IntWeight) -> bool:
    """Hopper, with CUDA C++, rows for which its kernels are the faster, and what they compute."""
    return (
        has_dependent_launch(x)
        and program.available()
        and int_linear_cuda.is_faster(x, weight)
        and int_linear_cuda.takes(x, weight)
    )


FORMAT = LinearFormat(
    IntWeight,
    "whole numbers",
    join=join_int,
    take_rows=lambda weight, rows: weight.take_rows(rows),
    multiply=int_linear,
    gated=gated_int_linear,
    waits=waits,
)
