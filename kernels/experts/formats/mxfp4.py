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

# Four bytes, the eight codes of four low and four high halves, to bfloat16, times a scale each: the
# upper and lower byte of a magnitude are looked up by prmt, whose selectors are the codes.
_HALF = """
shr.u32 t, c, 4;
or.b32 t, t, c;
prmt.b32 s, t, 0, 0x4420;
prmt.b32 hi, upper, 0x40404040, s;
prmt.b32 lo, lower, 0xC0804000, s;
or.b32 hi, hi, n;
prmt.b32 t, lo, hi, 0x5140;
fma.rn.bf16x2 {first}, t, $5, zero;
prmt.b32 t, lo, hi, 0x7362;
fma.rn.bf16x2 {second}, t, $6, zero;
"""
_ASM: tl.constexpr = tl.constexpr(
    """{
.reg .b32 c, t, s, hi, lo, n, upper, lower, zero;
mov.b32 upper, 0x3F3F3F00;
mov.b32 lower, 0xC0800000;
mov.b32 zero, 0x80008000;
and.b32 c, $4, 0x07070707;
shl.b32 n, $4, 4;
and.b32 n, n, 0x80808080;
"""
    + _HALF.format(first="$0", second="$1")
    + """
shr.u32 c, $4, 4;
and.b32 c, c, 0x07070707;
and.b32 n, $4, 0x80808080;
"""
    + _HALF.format(first="$2", second="$3")
    + "}"
)


# Lookups in place of arithmetic, for bfloat16. Compiled for Hopper, not yet run on one.
LOOKS_UP = False


@triton.jit
def _values(codes, scale, WIDE: tl.constexpr, LOOKS_UP: tl.constexpr):
    """What the low and the high 4 bits stand for, times the scale: sign and e2m1, 0, 0.5, 1, 1.5,
    2, 3, 4, 6. codes: uint8; scale: of their shape."""
    if LOOKS_UP:
        low, high = tl.inline_asm_elementwise(
            _ASM,
            "=&r,=&r,=&r,=&r,r,r,r",
            [codes, scale.to(tl.bfloat16)],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        low = (_value(codes & 15) * scale).to(WIDE)
        high = (_value(codes >> 4) * scale).to(WIDE)
    return low, high


@triton.jit
def _value(codes):
    """Two bits of exponent and one of mantissa behind the exponent of 0.5 are 0.5, 0.75, 1, 1.5, 2,
    3, 4, 6: the smaller of v and 2 v - 1 mends the first two."""
    bits = ((codes & 7).to(tl.int32) << 22) + 0x3F000000
    v = bits.to(tl.float32, bitcast=True)
    v = tl.minimum(v, v + v - 1.0)
    return tl.where((codes & 8) != 0, -v, v)


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
        scale = exponent.to(tl.float32, bitcast=True)[:, :, None]
        taken = is_column[:, None] & is_row[None, :]
        x = tl.load(inputs + first * 32, mask=taken, other=0.0)
        behind = tl.load(inputs + first * 32 + 16, mask=taken, other=0.0)
        even = tl.broadcast_to(scale, (OUTS, GROUPS, 16))
        w, w_behind = _values(codes, even, WIDE, FORM[0])
        # A step's sums are added up outside of its products, so that the compiler waits for both.
        # It else leaves the last one running, and Triton 3.6 with its ptxas 12.8 widens the next
        # step's weights over those that it still reads (tests/kernels/wgmma_waits.py).
        part = tl.dot(tl.reshape(w, (OUTS, GROUPS * 16)), x, input_precision="ieee")
        w_behind = tl.reshape(w_behind, (OUTS, GROUPS * 16))
        sums += tl.dot(w_behind, behind, part, input_precision="ieee")
    return sums


def _operands(matrix: PackedExperts, dtype: torch.dtype, scale: Tensor | None) -> Operands:
    codes, scales = matrix.tensors["codes"], matrix.tensors["scale"]
    looks_up = LOOKS_UP and dtype == torch.bfloat16
    return Operands((codes, scales, scales, scales), (int(looks_up),), matrix.shape[2])


FORMAT = ExpertFormat(Mxfp4Weight, _operands, _sums)
