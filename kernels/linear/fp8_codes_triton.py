"""Products of FP8 codes on both sides in Triton: tiles of both are copied by the processor's tensor
copies, and multiplied as they lie in shared memory."""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from specengine.kernels.dispatch import has_dependent_launch, has_much_shared
from specengine.kernels.linear.fp8_codes import (
    BLOCK,
    MANY_OUTS,
    MOST_SPLITS,
    computes,
    splits_by_block,
    splits_by_row,
)
from specengine.kernels.linear.quantised import Fp8Weight
from specengine.kernels.linear.split_sum_triton import (
    MAX_GROUPS,
    Tile,
    counters_of,
    partials_of,
    rows_block,
    store_part,
    store_sum,
)
from specengine.kernels.sizes import cdiv


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
def _fp8_codes_kernel(
    x_tiles,
    x_scale_ptr,
    tiles,
    codes_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    counters_ptr,
    num_rows,
    num_outs,
    columns,
    scale_rows,  # rows of the weight that share a scale
    scale_parts,  # scales of such rows
    BY_BLOCK: tl.constexpr,  # a scale for BLOCK_K columns on both sides, else one for a row
    ONE_SCALE: tl.constexpr,  # by block: a program's outputs share theirs
    HAS_BIAS: tl.constexpr,
    LEAVES_PARTS: tl.constexpr,  # of the sum, one a split, at partial_ptr
    DEPENDENT: tl.constexpr,
    PIECES: tl.constexpr,  # of a row of the weight, each of which a thread prefetches; 0: none does
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Programs of all rows follow each other, so that the weight is read from memory once."""
    first_row, first_out = tl.program_id(0) * BLOCK_T, tl.program_id(1) * BLOCK_N
    rows = first_row + tl.arange(0, BLOCK_T)
    outs = first_out + tl.arange(0, BLOCK_N)
    known, of_outs = tl.minimum(rows, num_rows - 1), tl.minimum(outs, num_outs - 1)
    # Parts are whole 256 columns, as those of fp8_rows.cu.
    pair: tl.constexpr = 256 // BLOCK_K
    blocks = tl.cdiv(columns, BLOCK_K)
    share = tl.cdiv(tl.cdiv(blocks, pair), SPLITS) * pair
    first = tl.program_id(2) * share
    last = tl.minimum(first + share, blocks)
    sums = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    if DEPENDENT:
        if PIECES:
            end = tl.minimum(last * BLOCK_K, columns)
            _prefetch_rows(
                codes_ptr, outs, num_outs, columns, first * BLOCK_K, end, PIECES, BLOCK_N
            )
        # In this order: what starts behind this kernel may read what was written before it.
        gdc_wait()
        gdc_launch_dependents()
    if BY_BLOCK:
        x_scales = x_scale_ptr + known * scale_parts
        scales = scale_ptr + (first_out if ONE_SCALE else of_outs) // scale_rows * scale_parts
        # A loop with stages of its own has scales fetched ahead, too.
        for block in tl.range(first, last, num_stages=STAGES):
            w = tiles.load([first_out, block * BLOCK_K])
            x = x_tiles.load([first_row, block * BLOCK_K])
            x_scale = tl.load(x_scales + block)
            scale = tl.load(scales + block)
            if ONE_SCALE:
                sums += tl.dot(w, x.T) * (x_scale * scale)[None, :]
            else:
                sums += tl.dot(w, x.T) * scale[:, None] * x_scale[None, :]
    else:
        # The processor keeps fewer bits of a longer sum than float32: a step's are added up in it.
        for block in range(first, last):
            w = tiles.load([first_out, block * BLOCK_K])
            x = x_tiles.load([first_row, block * BLOCK_K])
            sums += tl.dot(w, x.T)
        sums *= tl.load(scale_ptr + of_outs // scale_rows)[:, None]
        sums *= tl.load(x_scale_ptr + known)[None, :]
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


def tile_by_row(outs: int, rows: int) -> Tile:
    """As swept at the layers of an 8B on an H200, 16 to 256 rows: of these the fastest, or a few
    percent behind (benchmarks/kernels/fp8_products.py)."""
    is_narrow = outs <= 4224
    if rows > 64:
        return Tile(64, 256, 1, 4, 6) if is_narrow and rows <= 128 else Tile(64, 256, 1, 4, 4, 128)
    splits = splits_by_row(outs)
    if is_narrow:
        return Tile(64, 256, splits, 4, 6)
    if outs >= MANY_OUTS and rows <= 16:
        return Tile(128, 256, splits, 4, 3)
    return Tile(64, 256, splits, 4, 4 if rows <= 32 else 3)


def tile_by_block(outs: int, columns: int, rows: int) -> Tile:
    """As swept at the layers of an 8B and of Qwen3-Next, 8 to 256 rows
    (benchmarks/kernels/fp8_products.py).

    What is prefetched arrives before the kernel ahead has ended where the weight is small; of
    19 MB prefetching made products slower (benchmarks/kernels/hybrid_products.py)."""
    prefetches = outs * columns <= _MOST_PREFETCHED
    if rows <= 64:
        splits = splits_by_block(outs, columns)
        if cdiv(outs, 128) * splits < 48:
            return Tile(64, BLOCK, splits, 4, 4, prefetches=prefetches)
        return Tile(128, BLOCK, splits, 4, 4 if outs >= MANY_OUTS else 6, prefetches=prefetches)
    wide, high = (64, 128) if rows <= 128 else (128, 64)
    programs, splits = cdiv(outs, wide) * cdiv(rows, high), 1
    while splits < MOST_SPLITS and (splits * programs < 96 or columns > splits * _LONGEST):
        splits *= 2
    stages = 6 if splits * programs <= 132 else 4  # one program a multiprocessor, or more
    return Tile(wide, BLOCK, splits, 4, stages, high, prefetches)


def takes(x: Tensor, weight: Fp8Weight) -> bool:
    """Whether the processor has the product and the copies, and the weight the form."""
    return has_dependent_launch(x) and has_much_shared(x) and computes(x, weight)


def fp8_linear(
    codes: Tensor,
    scale: Tensor,
    weight: Fp8Weight,
    bias: Tensor | None,
    dtype: torch.dtype,
    tile: Tile | None = None,
    parts: Tensor | None = None,
) -> Tensor:
    """codes [T, K] and scale [T, 1] or [T, K / 128], as `fp8_linear.quantise_rows` gives them
    -> [T, N] of dtype. parts: float32 [splits, T, N], which are filled with what splits give and
    returned in place of the sum; for products without a bias."""
    (num_rows, columns), num_outs = codes.shape, weight.shape[0]
    size, is_by_block = (num_rows, num_outs), weight.columns < columns
    if tile is None:
        by_block = tile_by_block(num_outs, columns, num_rows)
        tile = by_block if is_by_block else tile_by_row(num_outs, num_rows)
    assert parts is None or (bias is None and len(parts) == tile.splits)
    out = torch.empty(size, dtype=dtype, device=codes.device) if parts is None else parts
    block_t = rows_block(num_rows, tile.rows)
    grid = cdiv(num_rows, block_t), cdiv(num_outs, tile.outs), tile.splits
    assert tile.splits == 1 or grid[0] * grid[1] <= MAX_GROUPS, "more parts than counters"
    dependent = has_dependent_launch(codes)
    _fp8_codes_kernel[grid](
        TensorDescriptor.from_tensor(codes, [block_t, tile.columns]),
        scale,
        TensorDescriptor.from_tensor(weight.codes, [tile.outs, tile.columns]),
        weight.codes,
        weight.scale,
        weight.scale if bias is None else bias,
        out,
        partials_of(tile.splits, *size, codes.device) if parts is None else parts,
        counters_of(codes.device),
        num_rows,
        num_outs,
        columns,
        weight.rows,
        weight.scale.shape[1],
        BY_BLOCK=is_by_block,
        ONE_SCALE=weight.rows % BLOCK == 0,
        HAS_BIAS=bias is not None,
        LEAVES_PARTS=parts is not None,
        DEPENDENT=dependent,
        PIECES=max(1, 32 * tile.warps // tile.outs) if tile.prefetches else 0,  # of a thread one
        BLOCK_N=tile.outs,
        BLOCK_T=block_t,
        BLOCK_K=tile.columns,
        SPLITS=tile.splits,
        STAGES=tile.stages,
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=is_by_block,  # as in fp8_rows.cu, whose bits these are
        **({"launch_pdl": True} if dependent else {}),
    )
    return out


_MOST_PREFETCHED = 9 << 20  # bytes of a weight
_LONGEST = 8192  # columns of a part of the sums of many rows
