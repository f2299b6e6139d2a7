"""Experts in FP8 (e4m3): one scale, one a row, or one a block of rows and columns.

Where inputs are codes too, the processor multiplies codes as they lie in shared memory; each step's
sums are added up in float32, as it keeps fewer bits over many columns. Else codes are widened in
registers to the type of inputs, which is exact. Where a block of columns has a scale, it is applied
to the block's sums.
"""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from specengine.kernels.experts.packed import ExpertFormat, Operands, PackedExperts
from specengine.kernels.experts.tiles import PACKED, Tile, Tiles
from specengine.kernels.linear.quantised import Fp8Weight

_WIDE = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_CODES = 3


@triton.jit
def _sums(
    x_ptr,
    rows,
    is_row,
    codes_ptr,
    scale_ptr,
    x_scale_ptr,
    unused_ptr,
    expert,
    outs,
    is_out,
    num_outs,
    columns,
    unused_part,
    PARTS: tl.constexpr,
    FORM: tl.constexpr,
    OUTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tl.static_assert(PARTS == 1, "sums are whole")
    SCALE_ROWS: tl.constexpr = FORM[0]  # rows of a weight that share a scale
    NUM_SCALE_ROWS: tl.constexpr = FORM[1]
    BY_BLOCK: tl.constexpr = FORM[2]  # 0, or the columns that share one: a multiple of BLOCK_K
    HAS_CODES: tl.constexpr = FORM[3]  # inputs are codes with scales
    CODES_BY_BLOCK: tl.constexpr = FORM[4]  # of each BY_BLOCK columns
    ROUNDS: tl.constexpr = FORM[5]  # inputs are rounded here, BLOCK_K columns by one scale
    tl.static_assert(BY_BLOCK % BLOCK_K == 0, "a step has one scale of weights")
    AS_CODES: tl.constexpr = FORM[6] == 3
    WIDE: tl.constexpr = (
        tl.float32 if FORM[6] == 0 else (tl.float16 if FORM[6] == 1 else tl.bfloat16)
    )
    parts = tl.cdiv(columns, BY_BLOCK) if BY_BLOCK else 1
    weights = codes_ptr + (expert.to(tl.int64) * num_outs + outs.to(tl.int64))[:, None] * columns
    inputs = x_ptr + rows.to(tl.int64)[None, :] * columns
    w_scales = scale_ptr + (expert * NUM_SCALE_ROWS + outs // SCALE_ROWS) * parts
    x_scales = x_scale_ptr + rows * (parts if CODES_BY_BLOCK else 1)
    sums = tl.zeros((OUTS, ROWS), tl.float32)
    # Plain inputs: a step's sums are scaled within the loop, as in fp8_linear_triton.py.
    SCALES_STEPS: tl.constexpr = BY_BLOCK == 0 and not HAS_CODES
    if SCALES_STEPS:
        w_scale = tl.load(w_scales, mask=is_out, other=0.0)
    for k0 in range(0, columns, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        is_k = k < columns
        w = tl.load(weights + k[None, :], mask=is_out[:, None] & is_k[None, :], other=0.0)
        x = tl.load(inputs + k[:, None], mask=is_k[:, None] & is_row[None, :], other=0.0)
        if ROUNDS:
            wide = x.to(tl.float32)
            x_scale = tl.maximum(tl.max(tl.abs(wide), axis=0) / 448.0, 1e-12)
            x = (wide / x_scale[None, :]).to(tl.float8e4nv)
        if AS_CODES:
            part = tl.dot(w, x)
        else:
            part = tl.dot(w.to(WIDE), x.to(WIDE), input_precision="ieee")
        if BY_BLOCK:
            part *= tl.load(w_scales + k0 // BY_BLOCK, mask=is_out, other=0.0)[:, None]
            if CODES_BY_BLOCK:
                x_scale = tl.load(x_scales + k0 // BY_BLOCK, mask=is_row, other=0.0)
                part *= x_scale[None, :]
        if ROUNDS:
            part *= x_scale[None, :]
        if SCALES_STEPS:
            part *= w_scale[:, None]
        sums += part
    if BY_BLOCK == 0 and not SCALES_STEPS:
        sums *= tl.load(w_scales, mask=is_out, other=0.0)[:, None]
    if HAS_CODES and not CODES_BY_BLOCK:
        sums *= tl.load(x_scales, mask=is_row, other=0.0)[None, :]
    return sums


def _operands(matrix: PackedExperts, dtype: torch.dtype, scale: Tensor | None) -> Operands:
    weight: Fp8Weight = matrix.first
    columns = weight.shape[1]
    codes, scales = matrix.tensors["codes"], matrix.tensors["scale"]
    by_block = weight.columns if weight.columns < columns else 0
    rounds = matrix.input is not None and scale is None
    group = matrix.input.group if matrix.input is not None and rounds else None
    are_codes = matrix.input is not None and dtype != torch.float32
    wide = _CODES if are_codes else _WIDE[dtype]
    form = (
        weight.rows,
        scales.shape[1],
        by_block,
        int(scale is not None),
        int(scale is not None and scale.shape[1] > 1),
        int(rounds),
        wide,
    )
    most = min(by_block or columns, group or columns)
    given = codes, scales, scales if scale is None else scale, scales
    return Operands(given, form, most)


# Within the limits of registers nothing spills, and a multiprocessor has more programs of few rows.
_NARROW, _WIDER = Tile(16, 32, 256, 4, 3), Tile(16, 64, 256, 4, 3)
_SORTED = PACKED.many[-1][1]
_TILES = replace(
    PACKED,
    few=(
        (0.25, Tiles(_WIDER, Tile(16, 128, 256, 4, 4, turns=2))),
        (0.03, Tiles(replace(_NARROW, registers=96), replace(_WIDER, registers=96))),
        (0.0, Tiles(replace(_NARROW, registers=128), replace(_WIDER, registers=128))),
    ),
    many=(
        # Dozens of rows of 512 experts, or hundreds: four warps, so that two programs fit. More
        # rows would not fit in registers (benchmarks/kernels/prompt_experts.py).
        (24.0, Tiles(Tile(64, 64, 128, 4, 3), Tile(64, 128, 128, 4, 3))),
        PACKED.many[2],
        (4.0, _SORTED),
        # 512 experts of an H200, 64 and 128 rows (benchmarks/kernels/block_experts.py).
        (0.0, Tiles(replace(_SORTED.gate_up, outs=32, stages=5), replace(_SORTED.down, outs=256))),
    ),
)
FORMAT = ExpertFormat(Fp8Weight, _operands, _sums, tiles=_TILES)
