"""The gated activation of Llama-style feed-forward layers (SwiGLU, Shazeer 2020)."""

from __future__ import annotations

from torch import Tensor

from specengine.kernels.dispatch import Backend, use_native, use_triton
from specengine.kernels.linear import activation_ref
from specengine.kernels.native import ops as native


def silu_and_mul(x: Tensor, *, backend: Backend = "auto") -> Tensor:
    """For each row [gate | up]: ``out[i] = silu(gate[i]) * up[i]``, silu rounded to x's dtype.

    x: [T, 2I], rows contiguous -> [T, I]. Any device; Triton on CUDA, C for few
    rows on a CPU.
    """
    if use_triton(backend, x):
        from specengine.kernels.linear import activation_triton

        return activation_triton.silu_and_mul(x)
    if use_native(backend, x):
        return native.silu_and_mul(x)
    return activation_ref.silu_and_mul(x)
