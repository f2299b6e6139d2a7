"""Experts in MXFP4: 4 bits (e2m1), and a power of 2 for each 32 columns. A weight is exact in every
type of inputs, so that sums are those of the dense product."""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specengine.kernels.experts.packed import ExpertFormat, Operands, PackedExperts
from specengine.kernels.linear.mxfp4 import Mxfp4Weight


@triton.jit
def _values(codes, WIDE: tl.constexpr):
    """What 4 bits stand for, sign and e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6.

    Two bits of exponent and one of mantissa behind the exponent of 0.5 are 0.5, 0.75, 1, 1.5, 2, 3,
    4, 6: the smaller of v and 2 v - 1 mends the first two."""
    if tl.bfloat16 == WIDE:
        bits = ((codes & 7).to(tl.int16) << 6) + 0x3F00
        v = bits.to(tl.bfloat16, bitcast=True)
        v = tl.minimum(v, (v + v - 1.0).to(tl.bfloat16))
        signed = v.to(tl.int16, bitcast=True) | ((codes & 8).to(tl.int16) << 12)
        return signed.to(tl.bfloat16, bitcast=True)
    bits = ((codes & 7).to(tl.int32) << 22) + 0x3F000000
    v = bits.to(tl.float32, bitcast=True)
    v = tl.minimum(v, v + v - 1.0)
    return tl.where((codes & 8) != 0, -v, v).to(WIDE)


@triton.jit
def _sums(
    x_ptr,
    rows,
    is_row,
    codes_ptr,
    scale_ptr,
    unused_ptr,
    spare_ptr,
    expert,
    outs,
    is_out,
    num_outs,
    columns,
    FORM: tl.constexpr,
    OUTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    WIDE: tl.constexpr = x_ptr.dtype.element_ty
    GROUPS: tl.constexpr = BLOCK_K // 32
    groups = columns // 32
    place = expert.to(tl.int64) * num_outs + outs.to(tl.int64)
    group = tl.arange(0, GROUPS)
    held = group[:, None] * 16 + tl.arange(0, 16)[None, :]
    weights = codes_ptr + place[:, None, None] * (groups * 16) + held[None, :, :]
    scales = scale_ptr + place[:, None] * groups + group[None, :]
    column = tl.arange(0, GROUPS * 16)
    low = (column // 16) * 32 + column % 16
    inputs = x_ptr + rows.to(tl.int64)[None, :] * columns + low[:, None]
    sums = tl.zeros((OUTS, ROWS), tl.float32)
    for first in range(0, groups, GROUPS):
        is_group = first + group < groups
        is_column = first * 32 + low < columns
        mask = is_out[:, None] & is_group[None, :]
        codes = tl.load(weights + first * 16, mask=mask[:, :, None], other=0)
        exponent = tl.load(scales + first, mask=mask, other=0).to(tl.int32) << 23
        scale = exponent.to(tl.float32, bitcast=True).to(WIDE)[:, :, None]
        taken = is_column[:, None] & is_row[None, :]
        x = tl.load(inputs + first * 32, mask=taken, other=0.0)
        behind = tl.load(inputs + first * 32 + 16, mask=taken, other=0.0)
        w = tl.reshape(_values(codes & 15, WIDE) * scale, (OUTS, GROUPS * 16))
        sums = tl.dot(w, x, sums, input_precision="ieee")
        w = tl.reshape(_values(codes >> 4, WIDE) * scale, (OUTS, GROUPS * 16))
        sums = tl.dot(w, behind, sums, input_precision="ieee")
    return sums


def _operands(matrix: PackedExperts, dtype: torch.dtype, scale: Tensor | None) -> Operands:
    codes, scales = matrix.tensors["codes"], matrix.tensors["scale"]
    return Operands((codes, scales, scales, scales), (0,), matrix.shape[2])


FORMAT = ExpertFormat(Mxfp4Weight, _operands, _sums)
