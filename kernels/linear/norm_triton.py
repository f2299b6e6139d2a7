"""RMS norm in Triton: one program a row, or some rows of heads."""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specengine.kernels.dispatch import has_dependent_launch
from specengine.kernels.linear.round_triton import room_for, store_rounded, wait_for_rows
from specengine.kernels.linear.rounded import NOT_ROUNDED, put_beside
from specengine.kernels.sizes import cdiv, power_of_2

# Of a thread that adds up parts. With this limit the compiler has the loads of all parts on their
# way before the first addition; else it spares registers, and a row waits for memory part after
# part.
_REGISTERS = 128
_HEADS_NUMBERS = 2048  # of the rows of one program


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    codes_ptr,
    scale_ptr,
    stride_row,
    hidden,
    eps,
    ROUNDS: tl.constexpr,
    EARLY: tl.constexpr,
    DEPENDENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < hidden
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0)
    if DEPENDENT:
        wait_for_rows(EARLY)
    x = tl.load(x_ptr + row * stride_row + cols, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / hidden + eps)
    normed = (x * scale).to(weight.dtype)
    made = (normed * weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * hidden + cols, made, mask=mask)
    if ROUNDS:
        store_rounded(made, codes_ptr, scale_ptr, row, hidden, cols, mask, ROUNDS, BLOCK)


@triton.jit(do_not_specialize=["rows"])
def _norm_heads_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    rows,
    heads,
    stride_row,
    stride_head,
    size,
    eps,
    DEPENDENT: tl.constexpr,
    EARLY: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows are the heads of all tokens, one behind the other."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (cols < size)[None, :]
    weight = tl.load(weight_ptr + cols, mask=cols < size, other=0.0)[None, :]
    if DEPENDENT:
        wait_for_rows(EARLY)
    starts = (row // heads).to(tl.int64) * stride_row + row % heads * stride_head
    x = tl.load(x_ptr + starts[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / size + eps)
    normed = (x * scale[:, None]).to(weight.dtype)
    made = (normed * weight).to(out_ptr.dtype.element_ty)
    places = row.to(tl.int64)[:, None] * size + cols[None, :]
    tl.store(out_ptr + places, made, mask=mask)


@triton.jit
def _add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    codes_ptr,
    scale_ptr,
    stride_x,
    stride_residual,
    hidden,
    eps,
    ROUNDS: tl.constexpr,
    EARLY: tl.constexpr,
    DEPENDENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < hidden
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0)
    if DEPENDENT:
        wait_for_rows(EARLY)
    x = tl.load(x_ptr + row * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + row * stride_residual + cols, mask=mask, other=0.0)
    rounded = (x + residual.to(tl.float32)).to(total_ptr.dtype.element_ty)
    tl.store(total_ptr + row * hidden + cols, rounded, mask=mask)
    total = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total, axis=0) / hidden + eps)
    normed = (total * scale).to(weight.dtype)
    made = (normed * weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * hidden + cols, made, mask=mask)
    if ROUNDS:
        store_rounded(made, codes_ptr, scale_ptr, row, hidden, cols, mask, ROUNDS, BLOCK)


@triton.jit
def _sum_add_rms_norm_kernel(
    parts_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    codes_ptr,
    scale_ptr,
    stride_part,
    stride_residual,
    hidden,
    eps,
    PARTS: tl.constexpr,
    ROUNDS: tl.constexpr,
    DEPENDENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < hidden
    if DEPENDENT:
        gdc_launch_dependents()
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0)
    residual = tl.load(residual_ptr + row * stride_residual + cols, mask=mask, other=0.0)
    if DEPENDENT:
        gdc_wait()
    x = tl.load(parts_ptr + row * hidden + cols, mask=mask, other=0.0)
    for part in tl.static_range(1, PARTS):
        x += tl.load(parts_ptr + part * stride_part + row * hidden + cols, mask=mask, other=0.0)
    x = x.to(total_ptr.dtype.element_ty).to(tl.float32)
    rounded = (x + residual.to(tl.float32)).to(total_ptr.dtype.element_ty)
    tl.store(total_ptr + row * hidden + cols, rounded, mask=mask)
    total = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total, axis=0) / hidden + eps)
    normed = (total * scale).to(weight.dtype)
    made = (normed * weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * hidden + cols, made, mask=mask)
    if ROUNDS:
        store_rounded(made, codes_ptr, scale_ptr, row, hidden, cols, mask, ROUNDS, BLOCK)


def _block(hidden: int) -> tuple[int, int]:
    """Columns a program takes, and its warps."""
    block = power_of_2(hidden)
    return block, min(max(block // 256, 1), 16)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, rounds: int = NOT_ROUNDED, awaited: bool = False
) -> Tensor:
    """rounds: rows of x [T, H] are rounded, too (rounded.py); none of heads [T, N, H]. awaited: as
    of norm.rms_norm."""
    hidden = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    if x.dim() == 3:
        return _norm_heads(x, weight, eps, awaited, out)
    codes, rounded_scale = room_for(x, hidden, rounds)
    dependent = has_dependent_launch(x)
    block, warps = _block(hidden)
    _rms_norm_kernel[(out.numel() // hidden,)](
        x,
        weight,
        out,
        codes,
        rounded_scale,
        x.stride(0) if x.dim() > 1 else 0,
        hidden,
        eps,
        ROUNDS=rounds,
        EARLY=bool(rounds) or awaited,
        DEPENDENT=dependent,
        BLOCK=block,
        num_warps=warps,
        **({"launch_pdl": True} if dependent else {}),
    )
    return put_beside(out, codes, rounded_scale) if rounds else out


def _norm_heads(x: Tensor, weight: Tensor, eps: float, awaited: bool, out: Tensor) -> Tensor:
    """The same form for any number of rows, so that a row's bits do not depend on it."""
    tokens, heads, size = x.shape
    block = power_of_2(size)
    rows = max(_HEADS_NUMBERS // block, 1)
    dependent = has_dependent_launch(x)
    _norm_heads_kernel[(cdiv(tokens * heads, rows),)](
        x,
        weight,
        out,
        tokens * heads,
        heads,
        x.stride(0),
        x.stride(1),
        size,
        eps,
        DEPENDENT=dependent,
        EARLY=awaited,
        ROWS=rows,
        BLOCK=block,
        num_warps=4,
        **({"launch_pdl": True} if dependent else {}),
    )
    return out


def fused_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    rounds: int = NOT_ROUNDED,
    awaited: bool = False,
) -> tuple[Tensor, Tensor]:
    """rounds: rows of the first result are rounded, too (rounded.py). awaited: as of rms_norm."""
    rows, hidden = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(out)
    if rows == 0:
        return out, total
    codes, rounded_scale = room_for(x, hidden, rounds)
    dependent = has_dependent_launch(x)
    block, warps = _block(hidden)
    _add_rms_norm_kernel[(rows,)](
        x,
        residual,
        weight,
        out,
        total,
        codes,
        rounded_scale,
        x.stride(0),
        residual.stride(0),
        hidden,
        eps,
        ROUNDS=rounds,
        EARLY=bool(rounds) or awaited,
        DEPENDENT=dependent,
        BLOCK=block,
        num_warps=warps,
        **({"launch_pdl": True} if dependent else {}),
    )
    return (put_beside(out, codes, rounded_scale) if rounds else out), total


def sum_add_rms_norm(
    parts: Tensor, residual: Tensor, weight: Tensor, eps: float, rounds: int = NOT_ROUNDED
) -> tuple[Tensor, Tensor]:
    """rounds: rows of the first result are rounded, too (rounded.py)."""
    count, rows, hidden = parts.shape
    out = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
    total = torch.empty_like(out)
    if rows == 0:
        return out, total
    codes, rounded_scale = room_for(residual, hidden, rounds)
    dependent = has_dependent_launch(parts)
    block, warps = _block(hidden)
    _sum_add_rms_norm_kernel[(rows,)](
        parts,
        residual,
        weight,
        out,
        total,
        codes,
        rounded_scale,
        parts.stride(0),
        residual.stride(0),
        hidden,
        eps,
        PARTS=count,
        ROUNDS=rounds,
        DEPENDENT=dependent,
        BLOCK=block,
        num_warps=warps,
        maxnreg=_REGISTERS,
        **({"launch_pdl": True} if dependent else {}),
    )
    return (put_beside(out, codes, rounded_scale) if rounds else out), total
