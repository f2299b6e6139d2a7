"""Products with an FP8 weight in Triton, for few rows: the weight is read once for a block of them.

Where inputs are codes too, the processor multiplies codes as they lie in shared memory; a step's
sums are added up in float32, as it keeps fewer bits of a longer sum. Else codes are widened in
registers, which is exact.
"""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specengine.kernels.dispatch import has_dependent_launch
from specengine.kernels.linear.quantised import FP8, Fp8Input, Fp8Weight
from specengine.kernels.linear.rounded import found_beside
from specengine.kernels.linear.split_sum_triton import (
    Tile,
    counters_of,
    partials_of,
    rows_block,
    store_part,
    store_sum,
)
from specengine.kernels.sizes import cdiv, power_of_2


@triton.jit(do_not_specialize=["num_groups"])
def _quantise_kernel(
    x_ptr,
    given_ptr,
    codes_ptr,
    scale_ptr,
    num_groups,
    stride_x,
    columns,
    group,
    HAS_SCALE: tl.constexpr,
    DEPENDENT: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program takes GROUPS groups of columns, counted through all rows."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    order = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    cols = tl.arange(0, BLOCK)
    mask = (order < num_groups)[:, None] & (cols < group)[None, :]
    row = (order // (columns // group)).to(tl.int64)
    start = order % (columns // group) * group
    x = tl.load(x_ptr + (row * stride_x + start)[:, None] + cols[None, :], mask=mask, other=0.0)
    x = x.to(tl.float32)
    if HAS_SCALE:
        scale = tl.zeros((GROUPS,), tl.float32) + tl.load(given_ptr)
    else:
        scale = tl.maximum(tl.max(tl.abs(x), axis=1) / 448.0, 1e-12)
    codes = tl.minimum(tl.maximum(x / scale[:, None], -448.0), 448.0)
    place = (row * columns + start)[:, None] + cols[None, :]
    tl.store(codes_ptr + place, codes.to(codes_ptr.dtype.element_ty), mask=mask)
    tl.store(scale_ptr + order, scale, mask=order < num_groups)


def quantise_rows(x: Tensor, form: Fp8Input) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    group = columns if form.scale is not None else form.group or columns
    parts = columns // group
    codes = torch.empty((rows, columns), dtype=FP8, device=x.device)
    scale = torch.empty((rows, parts), dtype=torch.float32, device=x.device)
    block = power_of_2(group)
    groups = max(1, 1024 // block)
    dependent = has_dependent_launch(x)
    _quantise_kernel[(cdiv(rows * parts, groups),)](
        x,
        x if form.scale is None else form.scale,
        codes,
        scale,
        rows * parts,
        x.stride(0),
        columns,
        group,
        HAS_SCALE=form.scale is not None,
        DEPENDENT=dependent,
        GROUPS=groups,
        BLOCK=block,
        num_warps=max(1, min(groups * block // 512, 8)),
        **({"launch_pdl": True} if dependent else {}),
    )
    return codes, scale


@triton.jit
def _prefetch_rows(
    codes_ptr, outs, num_outs, columns, begin, end, PIECES: tl.constexpr, OUTS: tl.constexpr
):
    """Bytes begin to end of some rows of the weight, into the L2 cache. A thread asks for a piece
    of one row; addresses and sizes are whole 16 bytes."""
    piece = tl.arange(0, PIECES)
    step = tl.cdiv(end - begin, PIECES * 16) * 16
    start = tl.minimum(begin + piece * step, columns - 16)
    size = tl.maximum(tl.minimum(start + step, end) - start, 16)
    row = tl.minimum(outs, num_outs - 1).to(tl.int64)
    place = codes_ptr.to(tl.int64) + (row * columns)[:, None] + start[None, :]
    sizes = tl.broadcast_to(size[None, :], [OUTS, PIECES])
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [place, sizes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["num_rows"])  # one form for all numbers of rows
def _fp8_kernel(
    x_ptr,
    x_scale_ptr,
    codes_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    counters_ptr,
    num_rows,
    num_outs,
    columns,
    stride_x,
    scale_rows,  # rows of the weight that share a scale
    scale_parts,  # scales of such rows
    WIDE: tl.constexpr,  # what codes are widened to; None: they are multiplied as they are
    HAS_INPUT_SCALE: tl.constexpr,
    BY_BLOCK: tl.constexpr,  # 0, or the columns that share a scale: a multiple of BLOCK_K
    INPUT_BY_BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    LEAVES_PARTS: tl.constexpr,  # of the sum, one a split, at partial_ptr
    DEPENDENT: tl.constexpr,
    PIECES: tl.constexpr,  # of a row of the weight, each of which a thread prefetches; 0: none does
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
):
    outs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_out, is_row = outs < num_outs, rows < num_rows
    blocks = tl.cdiv(columns, BLOCK_K)
    share = tl.cdiv(blocks, SPLITS)
    first = tl.program_id(2) * share
    last = tl.minimum(first + share, blocks)
    weights = codes_ptr + outs[:, None].to(tl.int64) * columns
    inputs = x_ptr + rows[None, :].to(tl.int64) * stride_x
    w_scales = scale_ptr + (outs // scale_rows) * scale_parts
    x_scales = x_scale_ptr + rows * (tl.cdiv(columns, BY_BLOCK) if INPUT_BY_BLOCK else 1)
    sums = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    # Plain inputs: a step's sums are scaled within the loop, so that the compiler waits for their
    # product. It else leaves it running, and Triton 3.6 with its ptxas 12.8 widens the next step's
    # weights over those that it still reads (tests/kernels/wgmma_waits.py).
    SCALES_STEPS: tl.constexpr = BY_BLOCK == 0 and not HAS_INPUT_SCALE
    if SCALES_STEPS:
        w_scale = tl.load(w_scales, mask=is_out, other=0.0)
    if DEPENDENT:
        if PIECES:
            end = tl.minimum(last * BLOCK_K, columns)
            _prefetch_rows(
                codes_ptr, outs, num_outs, columns, first * BLOCK_K, end, PIECES, BLOCK_N
            )
        # In this order: what starts behind this kernel may read what was written before it.
        gdc_wait()
        gdc_launch_dependents()
    for block in range(first, last):
        cols = block * BLOCK_K + tl.arange(0, BLOCK_K)
        is_col = cols < columns
        w = tl.load(weights + cols[None, :], mask=is_out[:, None] & is_col[None, :], other=0.0)
        x = tl.load(inputs + cols[:, None], mask=is_col[:, None] & is_row[None, :], other=0.0)
        if WIDE is None:
            part = tl.dot(w, x)
        else:
            part = tl.dot(w.to(WIDE), x.to(WIDE), input_precision="ieee")
        if BY_BLOCK:
            place = block * BLOCK_K // BY_BLOCK
            part *= tl.load(w_scales + place, mask=is_out, other=0.0)[:, None]
            if INPUT_BY_BLOCK:
                part *= tl.load(x_scales + place, mask=is_row, other=0.0)[None, :]
        if SCALES_STEPS:
            part *= w_scale[:, None]
        sums += part
    if not BY_BLOCK and not SCALES_STEPS:
        sums *= tl.load(w_scales, mask=is_out, other=0.0)[:, None]
    if HAS_INPUT_SCALE and not INPUT_BY_BLOCK:
        sums *= tl.load(x_scales, mask=is_row, other=0.0)[None, :]
    if LEAVES_PARTS:
        store_part(sums, partial_ptr, outs, rows, num_outs, num_rows)
    else:
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


def tile_for(outs: int, wide: torch.dtype | None, is_rounded: bool, rows: int) -> Tile:
    """wide: what codes are widened to, None where they are multiplied as they are. is_rounded:
    whether inputs are codes too. Columns and splits do not depend on rows.

    As swept at the layers of an 8B, 1 to 64 rows (benchmarks/kernels): of these the fastest or a
    few percent behind; codes as they are on an H200, the others on an H100. Inputs of 16 bits want
    wider programs, which read them less often."""
    is_wide = outs >= 16384
    if wide is None:
        if is_wide:
            return Tile(64, 256, 1, 4, 4 if rows <= 32 else 3)
        return Tile(64, 256, 2 if outs > 2048 else 4, 4, 4 if outs <= 4224 else 3)
    columns = 128 if wide == torch.float32 else 256  # 64 rows of float32 leave less shared memory
    if is_wide:
        return Tile(32, columns, 1, 4, 3) if is_rounded else Tile(64, 128, 2, 4, 4)
    return Tile(32 if is_rounded else 64, columns, 4 if outs <= 4224 else 2, 4, 3)


def tile_of_blocks(outs: int, columns: int) -> Tile:
    """Of codes multiplied as they are, whose blocks have scales: few splits that leave 128
    multiprocessors a program each, or nearly, of no fewer than 512 columns.

    As swept at the layers of Qwen3-Next, 1, 8 and 64 rows, behind a norm on an H200
    (benchmarks/kernels/hybrid_products.py). What is prefetched arrives before the norm has ended
    where the weight is small; of 19 MB prefetching made all three slower."""
    splits = 1
    while splits < _MOST_SPLITS and splits * cdiv(outs, _OUTS) < _PROGRAMS:
        splits *= 2
    while splits > 1 and splits * _LEAST_COLUMNS > columns:
        splits //= 2
    prefetches = columns % 16 == 0 and outs * columns <= _MOST_PREFETCHED
    return Tile(_OUTS, _STEP, splits, 4, 5 if splits == 1 and not prefetches else 3, prefetches)


def splits_of(x: Tensor, weight: Fp8Weight) -> int:
    """Of a product of codes whose blocks have scales; 1 of others, which leave no parts."""
    is_by_block = weight.columns < weight.shape[1] and multiplies_codes(x, weight)
    return tile_of_blocks(*weight.shape).splits if is_by_block else 1


def multiplies_codes(x: Tensor, weight: Fp8Weight) -> bool:
    """Whether codes of both sides are multiplied as they are: by processors that have an FP8
    product, where a step has one scale. Of float32 inputs they are widened, which is exact."""
    has_steps = weight.columns >= weight.shape[1] or weight.columns % _LEAST_STEP == 0
    return has_steps and has_dependent_launch(x) and x.dtype != torch.float32


def fp8_linear(
    x: Tensor,
    weight: Fp8Weight,
    bias: Tensor | None,
    tile: Tile | None = None,
    rounded: tuple[Tensor, Tensor] | None = None,
    parts: Tensor | None = None,
) -> Tensor:
    """rounded: what `quantise_rows` gives of x. parts: float32 [splits, T, N], which are filled
    with what splits give and returned in place of the sum; for products without a bias."""
    num_rows, columns = x.shape
    num_outs = weight.shape[0]
    size = num_rows, num_outs
    out = torch.empty(size, dtype=x.dtype, device=x.device) if parts is None else parts
    inputs, scale = x, None
    wide: torch.dtype | None = x.dtype
    if weight.input is not None:
        kept = rounded or found_beside(x, weight.input)
        inputs, scale = kept or quantise_rows(x, weight.input)
        # Codes are float16 numbers, and float16 is what the processor widens them to.
        wide = torch.float32 if x.dtype == torch.float32 else torch.float16
        wide = None if multiplies_codes(x, weight) else wide
    by_block = weight.columns if weight.columns < columns else 0
    if tile is None and by_block and wide is None:
        tile = tile_of_blocks(num_outs, columns)
    tile = tile or tile_for(num_outs, wide, scale is not None, num_rows)
    assert parts is None or (bias is None and len(parts) == tile.splits)
    block_k = min(tile.columns, by_block) if by_block else tile.columns
    block_t = rows_block(num_rows)
    grid = cdiv(num_outs, tile.outs), cdiv(num_rows, block_t), tile.splits
    dependent = has_dependent_launch(x)
    _fp8_kernel[grid](
        inputs,
        weight.scale if scale is None else scale,
        weight.codes,
        weight.scale,
        weight.scale if bias is None else bias,
        out,
        partials_of(tile.splits, *size, x.device) if parts is None else parts,
        counters_of(x.device),
        num_rows,
        num_outs,
        columns,
        inputs.stride(0),
        weight.rows,
        weight.scale.shape[1],
        WIDE=None if wide is None else _TYPES[wide],
        HAS_INPUT_SCALE=scale is not None,
        BY_BLOCK=by_block,
        INPUT_BY_BLOCK=scale is not None and scale.shape[1] > 1,
        HAS_BIAS=bias is not None,
        LEAVES_PARTS=parts is not None,
        DEPENDENT=dependent,
        PIECES=_pieces(tile) if tile.prefetches and weight.codes.data_ptr() % 16 == 0 else 0,
        BLOCK_N=tile.outs,
        BLOCK_T=block_t,
        BLOCK_K=block_k,
        SPLITS=tile.splits,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **({"launch_pdl": True} if dependent else {}),
    )
    return out


def _pieces(tile: Tile) -> int:
    """So that each thread of a program has one."""
    return max(1, 32 * tile.warps // tile.outs)


_LEAST_STEP = 32  # columns of the processor's FP8 product
_OUTS, _STEP = 64, 128  # of a program of a weight in blocks: outputs, and columns at a time
_PROGRAMS, _MOST_SPLITS, _LEAST_COLUMNS = 128, 4, 512
_MOST_PREFETCHED = 9 << 20  # bytes of a weight
_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
