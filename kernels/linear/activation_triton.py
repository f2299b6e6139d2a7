"""Gated activation in Triton: a program takes a block of columns of one row."""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _act(x, ACT: tl.constexpr):
    """An activation of float32 values."""
    if ACT == "gelu":
        return 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
    if ACT == "gelu_tanh":
        # 0.5 * (1 + tanh(z)) is the logistic function of 2 z.
        z = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x / (1.0 + tl.exp(-2.0 * tl.maximum(z, -40.0)))  # an exp that stays finite
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _act_and_mul_kernel(x_ptr, out_ptr, stride_x, width, ACT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    gate = tl.load(x_ptr + row * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride_x + width + cols, mask=mask, other=0.0)
    activated = _act(gate, ACT).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * width + cols, activated * up, mask=mask)


def silu_and_mul(x: Tensor) -> Tensor:
    return act_and_mul(x, "silu")


def act_and_mul(x: Tensor, activation: str) -> Tensor:
    """activation: "silu", "gelu" or "gelu_tanh"."""
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows:
        grid = (rows, triton.cdiv(width, _BLOCK))
        _act_and_mul_kernel[grid](
            x, out, x.stride(0), width, ACT=activation, BLOCK=_BLOCK, num_warps=4
        )
    return out
