"""Products with an FP8 weight in Triton, for few rows: the weight is read once for a block of them,
and its codes are widened in registers, which is exact."""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specengine.kernels.dispatch import has_dependent_launch
from specengine.kernels.linear.fp8_codes import MANY_OUTS
from specengine.kernels.linear.quantised import FP8, Fp8Input, Fp8Weight
from specengine.kernels.linear.rounded import found_beside
from specengine.kernels.linear.split_sum_triton import (
    Tile,
    counters_of,
    partials_of,
    rows_block,
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
    WIDE: tl.constexpr,  # what codes are widened to
    HAS_INPUT_SCALE: tl.constexpr,
    BY_BLOCK: tl.constexpr,  # 0, or the columns that share a scale: a multiple of BLOCK_K
    INPUT_BY_BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
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
        # In this order: what starts behind this kernel may read what was written before it.
        gdc_wait()
        gdc_launch_dependents()
    for block in range(first, last):
        cols = block * BLOCK_K + tl.arange(0, BLOCK_K)
        is_col = cols < columns
        w = tl.load(weights + cols[None, :], mask=is_out[:, None] & is_col[None, :], other=0.0)
        x = tl.load(inputs + cols[:, None], mask=is_col[:, None] & is_row[None, :], other=0.0)
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


def tile_for(outs: int, wide: torch.dtype, is_rounded: bool) -> Tile:
    """wide: what codes are widened to. is_rounded: whether inputs are codes too.

    As swept at the layers of an 8B, 1 to 64 rows, on an H100: of these the fastest or a few percent
    behind. benchmarks/kernels/quantised.py sweeps those of inputs of 16 bits, which want wider
    programs, as these read them less often."""
    columns = 128 if wide == torch.float32 else 256  # 64 rows of float32 leave less shared memory
    if outs >= MANY_OUTS:
        return Tile(32, columns, 1, 4, 3) if is_rounded else Tile(64, 128, 2, 4, 4)
    return Tile(32 if is_rounded else 64, columns, 4 if outs <= 4224 else 2, 4, 3)


def fp8_linear(
    x: Tensor,
    weight: Fp8Weight,
    bias: Tensor | None,
    tile: Tile | None = None,
) -> Tensor:
    num_rows, columns = x.shape
    num_outs = weight.shape[0]
    size = num_rows, num_outs
    out = torch.empty(size, dtype=x.dtype, device=x.device)
    inputs, scale, wide = x, None, x.dtype
    if weight.input is not None:
        inputs, scale = found_beside(x, weight.input) or quantise_rows(x, weight.input)
        # Codes are float16 numbers, and float16 is what the processor widens them to.
        wide = torch.float32 if x.dtype == torch.float32 else torch.float16
    by_block = weight.columns if weight.columns < columns else 0
    tile = tile or tile_for(num_outs, wide, scale is not None)
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
        partials_of(tile.splits, *size, x.device),
        counters_of(x.device),
        num_rows,
        num_outs,
        columns,
        inputs.stride(0),
        weight.rows,
        weight.scale.shape[1],
        WIDE=_TYPES[wide],
        HAS_INPUT_SCALE=scale is not None,
        BY_BLOCK=by_block,
        INPUT_BY_BLOCK=scale is not None and scale.shape[1] > 1,
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


_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
