"""Gated activation in Triton: a program takes a block of columns of one row, or the whole row,
which it rounds to FP8, too."""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specengine.kernels.dispatch import has_dependent_launch
from specengine.kernels.linear.round_triton import room_for, store_rounded, wait_for_rows
from specengine.kernels.linear.rounded import NOT_ROUNDED, put_beside
from specengine.kernels.sizes import cdiv, power_of_2

_BLOCK = 1024
_MOST_WARPS = 32  # of a whole row, which one program rounds
# Rows up to which programs start before the product ahead has ended. Those of more take its room:
# 1,088 rows of a 135M took 3.0 us for 2.6, and a round 2% longer.
_MOST_AHEAD = 64


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
def _act_and_mul_kernel(
    x_ptr,
    out_ptr,
    codes_ptr,
    scale_ptr,
    stride_x,
    width,
    ACT: tl.constexpr,
    ROUNDS: tl.constexpr,  # then BLOCK holds a whole row
    DEPENDENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if DEPENDENT:
        wait_for_rows(ROUNDS)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    gate = tl.load(x_ptr + row * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride_x + width + cols, mask=mask, other=0.0)
    activated = _act(gate, ACT).to(out_ptr.dtype.element_ty)
    made = activated * up
    tl.store(out_ptr + row * width + cols, made, mask=mask)
    if ROUNDS:
        store_rounded(made, codes_ptr, scale_ptr, row, width, cols, mask, ROUNDS, BLOCK)


def silu_and_mul(x: Tensor) -> Tensor:
    return act_and_mul(x, "silu")


def act_and_mul(x: Tensor, activation: str, rounds: int = NOT_ROUNDED) -> Tensor:
    """activation: "silu", "gelu" or "gelu_tanh". rounds: rows are rounded, too (rounded.py)."""
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    codes, scale = room_for(x, width, rounds)
    block = max(power_of_2(width), _BLOCK) if rounds else _BLOCK
    dependent = bool(rounds or rows <= _MOST_AHEAD) and has_dependent_launch(x)
    _act_and_mul_kernel[(rows, cdiv(width, block))](
        x,
        out,
        codes,
        scale,
        x.stride(0),
        width,
        ACT=activation,
        ROUNDS=rounds,
        DEPENDENT=dependent,
        BLOCK=block,
        num_warps=min(4 * block // _BLOCK, _MOST_WARPS),
        **({"launch_pdl": True} if dependent else {}),
    )
    return put_beside(out, codes, scale) if rounds else out
