"""Products with a weight of 4 or 8 bits in Triton, for few rows: the weight is read once for up to
64 rows and widened in registers; scales are applied to the sums of a group."""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specengine.kernels.dispatch import has_dependent_launch
from specengine.kernels.linear.quantised import IntWeight
from specengine.kernels.linear.split_sum_triton import (
    Tile,
    counters_of,
    partials_of,
    rows_block,
    store_sum,
)
from specengine.kernels.sizes import cdiv


@triton.jit
def _minus(codes, zero, WIDE: tl.constexpr, BITS: tl.constexpr):
    """codes - zero, exactly. codes: uint8 [outs, columns]; zero: a whole number, float32 [outs].

    A code of 4 bits is put into the mantissa of 128 (bfloat16) or 1024 (float16): no conversion of
    integers, of which a multiprocessor makes few.
    """
    if BITS == 4 and tl.bfloat16 == WIDE:
        wide = (codes.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
        return wide - (zero + 128.0).to(tl.bfloat16)[:, None]
    if BITS == 4 and tl.float16 == WIDE:
        wide = (codes.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True)
        return wide - (zero + 1024.0).to(tl.float16)[:, None]
    return (codes.to(tl.float32) - zero[:, None]).to(WIDE)


@triton.jit(do_not_specialize=["num_rows"])  # one form for all numbers of rows
def _int_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    counters_ptr,
    num_rows,
    num_outs,
    columns,
    stride_x,
    group,  # columns; a multiple of BLOCK_K
    BITS: tl.constexpr,
    MIDDLE: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    WHOLE_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
):
    WIDE: tl.constexpr = x_ptr.dtype.element_ty
    outs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_out, is_row = outs < num_outs, rows < num_rows
    blocks = columns // BLOCK_K
    share = tl.cdiv(blocks, SPLITS)
    first = tl.program_id(2) * share
    last = tl.minimum(first + share, blocks)
    groups = columns // group
    BYTES: tl.constexpr = BLOCK_K * BITS // 8
    held = tl.arange(0, BYTES)
    # Of each 16 bytes the low halves are 16 columns, the high halves the 16 behind them.
    low = (held // 16) * 32 + held % 16 if BITS == 4 else held
    weights = codes_ptr + outs[:, None].to(tl.int64) * (columns * BITS // 8) + held[None, :]
    inputs = x_ptr + rows[None, :].to(tl.int64) * stride_x + low[:, None]
    sums = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    middle = tl.full((BLOCK_N,), MIDDLE, tl.float32)
    if DEPENDENT:
        # In this order, by int_linear.waits.
        gdc_wait()
        gdc_launch_dependents()
    for block in range(first, last):
        codes = tl.load(weights + block * BYTES, mask=is_out[:, None], other=0)
        x = tl.load(inputs + block * BLOCK_K, mask=is_row[None, :], other=0.0)
        place = outs * groups + block * BLOCK_K // group
        scale = tl.load(scale_ptr + place, mask=is_out, other=0.0).to(tl.float32)
        zero = middle
        if HAS_ZERO:
            zero = tl.load(zero_ptr + place, mask=is_out, other=0).to(tl.float32)
        taken = zero if WHOLE_ZERO else middle
        total = tl.sum(x.to(tl.float32), axis=0)
        if BITS == 4:
            part = tl.dot(_minus(codes & 15, taken, WIDE, BITS), x, input_precision="ieee")
            behind = tl.load(inputs + block * BLOCK_K + 16, mask=is_row[None, :], other=0.0)
            high = _minus(codes >> 4, taken, WIDE, BITS)
            part = tl.dot(high, behind, part, input_precision="ieee")
            total += tl.sum(behind.to(tl.float32), axis=0)
        else:
            part = tl.dot(_minus(codes, taken, WIDE, BITS), x, input_precision="ieee")
        if not WHOLE_ZERO:
            part -= (zero - middle)[:, None] * total[None, :]
        sums += part * scale[:, None]
    store_sum(
        sums,
        bias_ptr,
        out_ptr,
        partial_ptr,
        counters_ptr,
        outs,
        rows,
        num_outs,
        num_rows,
        HAS_BIAS,
        SPLITS,
    )


def tile_for(outs: int) -> Tile:
    """As swept on an H100 at the layers of an 8B, groups of 128, 1 to 64 rows
    (benchmarks/kernels/quantised.py): of these the fastest, or up to 19% behind it at 64 rows.
    Wide weights fill its 132 multiprocessors without being split."""
    return Tile(128, 128, 1 if outs >= 16384 else 4, 8, 3)


def int_linear(
    x: Tensor, weight: IntWeight, bias: Tensor | None, tile: Tile | None = None
) -> Tensor:
    num_rows, columns = x.shape
    num_outs = weight.shape[0]
    tile = tile or tile_for(num_outs)
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    block_k = min(tile.columns, weight.group & -weight.group)
    block_t = rows_block(num_rows)
    out = torch.empty((num_rows, num_outs), dtype=x.dtype, device=x.device)
    grid = cdiv(num_outs, tile.outs), cdiv(num_rows, block_t), tile.splits
    dependent = has_dependent_launch(x)
    _int_kernel[grid](
        x,
        weight.codes,
        weight.scale,
        weight.codes if weight.zero is None else weight.zero,
        weight.scale if bias is None else bias,
        out,
        partials_of(tile.splits, num_rows, num_outs, x.device),
        counters_of(x.device),
        num_rows,
        num_outs,
        columns,
        x.stride(0),
        weight.group,
        BITS=weight.bits,
        MIDDLE=weight.middle,
        HAS_ZERO=weight.zero is not None,
        WHOLE_ZERO=weight.zero is None or not weight.zero.is_floating_point(),
        HAS_BIAS=bias is not None,
        DEPENDENT=dependent,
        BLOCK_N=tile.outs,
        BLOCK_T=block_t,
        BLOCK_K=block_k,
        SPLITS=tile.splits,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **({"launch_pdl": True} if dependent else {}),
    )
    return out
