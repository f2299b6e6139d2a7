"""Experts in whole numbers of 4 or 8 bits with a scale, and perhaps a zero, a group of columns.

Codes less their zero are exact in the type of inputs; a group's scale is applied to its sums.
"""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specengine.kernels.experts.packed import ExpertFormat, Operands, PackedExperts
from specengine.kernels.linear.int_linear_triton import _minus
from specengine.kernels.linear.quantised import IntWeight


@triton.jit
def _sums(
    x_ptr,
    rows,
    is_row,
    codes_ptr,
    scale_ptr,
    zero_ptr,
    order_ptr,
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
    BITS: tl.constexpr = FORM[0]
    GROUP: tl.constexpr = FORM[1]  # columns; a multiple of BLOCK_K
    HAS_ZERO: tl.constexpr = FORM[2]
    WHOLE_ZERO: tl.constexpr = FORM[3]
    HAS_ORDER: tl.constexpr = FORM[4]
    WIDE: tl.constexpr = x_ptr.dtype.element_ty
    BYTES: tl.constexpr = BLOCK_K * BITS // 8
    groups = columns // GROUP
    held = tl.arange(0, BYTES)
    # Of each 16 bytes the low halves are 16 columns, the high halves the 16 behind them.
    low = (held // 16) * 32 + held % 16 if BITS == 4 else held
    place = expert.to(tl.int64) * num_outs + outs.to(tl.int64)
    weights = codes_ptr + place[:, None] * (columns * BITS // 8) + held[None, :]
    inputs = x_ptr + rows.to(tl.int64)[None, :] * columns
    order = order_ptr + expert.to(tl.int64) * columns + low
    middle = tl.full((OUTS,), 1 << (BITS - 1), tl.float32)
    sums = tl.zeros((OUTS, ROWS), tl.float32)
    for block in range(0, columns // BLOCK_K):
        codes = tl.load(weights + block * BYTES, mask=is_out[:, None], other=0)
        column = block * BLOCK_K + low
        if HAS_ORDER:
            column = tl.load(order + block * BLOCK_K)
        x = tl.load(inputs + column[:, None], mask=is_row[None, :], other=0.0)
        at = place * groups + block * BLOCK_K // GROUP
        scale = tl.load(scale_ptr + at, mask=is_out, other=0.0).to(tl.float32)
        zero = middle
        if HAS_ZERO:
            zero = tl.load(zero_ptr + at, mask=is_out, other=0).to(tl.float32)
        taken = zero if WHOLE_ZERO else middle
        if BITS == 4:
            part = tl.dot(_minus(codes & 15, taken, WIDE, BITS), x, input_precision="ieee")
            column = block * BLOCK_K + low + 16
            if HAS_ORDER:
                column = tl.load(order + block * BLOCK_K + 16)
            behind = tl.load(inputs + column[:, None], mask=is_row[None, :], other=0.0)
            high = _minus(codes >> 4, taken, WIDE, BITS)
            part = tl.dot(high, behind, part, input_precision="ieee")
            if not WHOLE_ZERO:
                total = tl.sum(x.to(tl.float32), axis=0) + tl.sum(behind.to(tl.float32), axis=0)
                part -= (zero - middle)[:, None] * total[None, :]
        else:
            part = tl.dot(_minus(codes, taken, WIDE, BITS), x, input_precision="ieee")
            if not WHOLE_ZERO:
                total = tl.sum(x.to(tl.float32), axis=0)
                part -= (zero - middle)[:, None] * total[None, :]
        sums += part * scale[:, None]
    return sums


def _operands(matrix: PackedExperts, dtype: torch.dtype, scale: Tensor | None) -> Operands:
    weight: IntWeight = matrix.first
    tensors = matrix.tensors
    zero = tensors.get("zero")
    is_whole = zero is None or not zero.is_floating_point()
    codes, order = tensors["codes"], tensors.get("order")
    form = weight.bits, weight.group, int(zero is not None), int(is_whole), int(order is not None)
    given = (
        codes,
        tensors["scale"],
        codes if zero is None else zero,
        codes if order is None else order,
    )
    return Operands(given, form, weight.group & -weight.group)


FORMAT = ExpertFormat(IntWeight, _operands, _sums)
