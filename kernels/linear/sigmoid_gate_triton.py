"""A sigmoid's gate in Triton: a program takes one row, which it rounds to FP8, too."""

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
from specengine.kernels.sizes import power_of_2


@triton.jit
def _sigmoid_gate_kernel(
    x_ptr,
    gate_ptr,
    out_ptr,
    codes_ptr,
    scale_ptr,
    stride_x,
    stride_row,
    stride_head,
    width,
    SIZE: tl.constexpr,
    ROUNDS: tl.constexpr,
    DEPENDENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if DEPENDENT:
        wait_for_rows(ROUNDS)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < width
    x = tl.load(x_ptr + row * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
    place = row * stride_row + cols // SIZE * stride_head + cols % SIZE
    gate = tl.load(gate_ptr + place, mask=mask, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    share = (1.0 / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    made = (x * share).to(dtype)
    tl.store(out_ptr + row * width + cols, made, mask=mask)
    if ROUNDS:
        store_rounded(made, codes_ptr, scale_ptr, row, width, cols, mask, ROUNDS, BLOCK)


def sigmoid_gate(x: Tensor, gate: Tensor, rounds: int = NOT_ROUNDED) -> Tensor:
    """rounds: rows are rounded, too (rounded.py)."""
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    codes, rounded_scale = room_for(x, width, rounds)
    dependent = has_dependent_launch(x)
    block = power_of_2(width)
    _sigmoid_gate_kernel[(rows,)](
        x,
        gate,
        out,
        codes,
        rounded_scale,
        x.stride(0),
        gate.stride(0),
        gate.stride(1),
        width,
        SIZE=gate.shape[2],
        ROUNDS=rounds,
        DEPENDENT=dependent,
        BLOCK=block,
        num_warps=min(max(block // 256, 1), 16),
        **({"launch_pdl": True} if dependent else {}),
    )
    return put_beside(out, codes, rounded_scale) if rounds else out
