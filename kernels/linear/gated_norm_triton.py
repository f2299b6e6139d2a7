"""Gated RMS norm in Triton: a program takes some heads of one row, or all of them where the row is
rounded to FP8 as a whole."""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specengine.kernels.dispatch import has_dependent_launch
from specengine.kernels.linear.round_triton import room_for, store_rounded, wait_for_rows
from specengine.kernels.linear.rounded import NOT_ROUNDED, WHOLE_ROWS, put_beside
from specengine.kernels.sizes import cdiv, power_of_2

_NUMBERS = 1024  # of a program, unless a group that shares a scale is larger


@triton.jit
def _gated_norm_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    codes_ptr,
    scale_ptr,
    stride_row,
    stride_head,
    heads,
    size,
    eps,
    ROUNDS: tl.constexpr,
    DEPENDENT: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * HEADS
    head, col = first + tl.arange(0, HEADS)[:, None], tl.arange(0, SIZE)[None, :]
    mask = (head < heads) & (col < size)
    place = head * size + col
    weight = tl.load(weight_ptr + col, mask=col < size, other=0.0)
    if DEPENDENT:
        wait_for_rows(ROUNDS)
    x = tl.load(x_ptr + row * heads * size + place, mask=mask, other=0.0)
    gate = tl.load(gate_ptr + row * stride_row + head * stride_head + col, mask=mask, other=0.0)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / size + eps)
    normed = (x * scale[:, None]).to(out_ptr.dtype.element_ty).to(tl.float32)
    normed = (normed * weight.to(tl.float32)).to(weight.dtype).to(tl.float32)
    wide = gate.to(tl.float32)
    made = normed * (wide / (1.0 + tl.exp(-wide)))
    made = made.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * heads * size + place, made, mask=mask)
    if ROUNDS:
        store_rounded(
            made,
            codes_ptr,
            scale_ptr,
            row,
            heads * size,
            place,
            mask,
            ROUNDS,
            HEADS * SIZE,
            first * SIZE,
        )


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, rounds: int = NOT_ROUNDED
) -> Tensor:
    """rounds: rows are rounded, too (rounded.py)."""
    rows, heads, size = x.shape
    out = torch.empty((rows, heads * size), dtype=gate.dtype, device=x.device)
    if not rows:
        return out
    codes, rounded_scale = room_for(x, heads * size, rounds)
    dependent = has_dependent_launch(x)
    blocks = _heads_of_program(heads, power_of_2(size), rounds), power_of_2(size)
    _gated_norm_kernel[(rows, cdiv(heads, blocks[0]))](
        x,
        gate,
        weight,
        out,
        codes,
        rounded_scale,
        gate.stride(0),
        gate.stride(1),
        heads,
        size,
        eps,
        ROUNDS=rounds,
        DEPENDENT=dependent,
        HEADS=blocks[0],
        SIZE=blocks[1],
        num_warps=min(max(blocks[0] * blocks[1] // 256, 1), 16),
        **({"launch_pdl": True} if dependent else {}),
    )
    return put_beside(out, codes, rounded_scale) if rounds else out


def _heads_of_program(heads: int, size: int, rounds: int) -> int:
    """A power of 2, the same for any number of rows. rounds: a program takes whole groups of so
    many values."""
    if rounds == WHOLE_ROWS:
        return power_of_2(heads)
    return max(1, min(power_of_2(heads), max(_NUMBERS, rounds) // size))
