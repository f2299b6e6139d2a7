"""Experts in whole numbers of 4 or 8 bits with a scale, and perhaps a zero, a group of columns.

Codes less the middle of their range are exact in the type of inputs. What a group's zero differs
from that is taken from its sums, and its scale is applied to them.
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
from specengine.kernels.linear.quantised import IntWeight

# Four bytes, the eight codes of four low and four high halves, to bfloat16 less 8: a code is put
# into the mantissa of 128.
_ASM: tl.constexpr = tl.constexpr(
    """{
.reg .b32 c, t, one, back, upper;
mov.b32 one, 0x3F803F80;
mov.b32 back, 0xC308C308;
mov.b32 upper, 0x43434343;
and.b32 c, $4, 0x0F0F0F0F;
prmt.b32 t, c, upper, 0x4140;
fma.rn.bf16x2 $0, t, one, back;
prmt.b32 t, c, upper, 0x4342;
fma.rn.bf16x2 $1, t, one, back;
shr.u32 c, $4, 4;
and.b32 c, c, 0x0F0F0F0F;
prmt.b32 t, c, upper, 0x4140;
fma.rn.bf16x2 $2, t, one, back;
prmt.b32 t, c, upper, 0x4342;
fma.rn.bf16x2 $3, t, one, back;
}"""
)


# Whether codes are widened by byte lookups (_ASM) without a card, too, for bfloat16. Triton's
# interpreter cannot do so; a test that only compiles the kernel can.
IN_PAIRS = False


@triton.jit
def _halves(codes, WIDE: tl.constexpr, IN_PAIRS: tl.constexpr):
    """The low and the high 4 bits, less 8. codes: uint8."""
    if IN_PAIRS:
        low, high = tl.inline_asm_elementwise(
            _ASM,
            "=&r,=&r,=&r,=&r,r",
            [codes],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        low = ((codes & 15).to(tl.float32) - 8.0).to(WIDE)
        high = ((codes >> 4).to(tl.float32) - 8.0).to(WIDE)
    return low, high


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
    unused_part,
    PARTS: tl.constexpr,
    FORM: tl.constexpr,
    OUTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tl.static_assert(PARTS == 1, "sums are whole")
    BITS: tl.constexpr = FORM[0]
    GROUP: tl.constexpr = FORM[1]  # columns; a multiple of BLOCK_K
    HAS_ZERO: tl.constexpr = FORM[2]
    HAS_ORDER: tl.constexpr = FORM[3]
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
    sums = tl.zeros((OUTS, ROWS), tl.float32)
    steps = columns // BLOCK_K
    scales, zeros = scale_ptr + place * groups, zero_ptr + place * groups
    scale = tl.load(scales, mask=is_out, other=0.0)
    if HAS_ZERO:
        zero = tl.load(zeros, mask=is_out, other=0)
    for block in range(0, steps):
        codes = tl.load(weights + block * BYTES, mask=is_out[:, None], other=0)
        column = block * BLOCK_K + low
        if HAS_ORDER:
            column = tl.load(order + block * BLOCK_K)
        x = tl.load(inputs + column[:, None], mask=is_row[None, :], other=0.0)
        # What the next step's sums are scaled by is on its way before this step's product waits.
        behind_it = tl.minimum(block + 1, steps - 1) * BLOCK_K // GROUP
        next_scale = tl.load(scales + behind_it, mask=is_out, other=0.0)
        if BITS == 4:
            w, w_behind = _halves(codes, WIDE, FORM[4])
            column = block * BLOCK_K + low + 16
            if HAS_ORDER:
                column = tl.load(order + block * BLOCK_K + 16)
            behind = tl.load(inputs + column[:, None], mask=is_row[None, :], other=0.0)
            part = tl.dot(w, x, input_precision="ieee")
            part = tl.dot(w_behind, behind, part, input_precision="ieee")
        else:
            w = (codes.to(tl.float32) - 128.0).to(WIDE)
            part = tl.dot(w, x, input_precision="ieee")
        if HAS_ZERO:
            total = tl.sum(x.to(tl.float32), axis=0)
            if BITS == 4:
                total += tl.sum(behind.to(tl.float32), axis=0)
            next_zero = tl.load(zeros + behind_it, mask=is_out, other=0)
            part -= (zero.to(tl.float32) - (1 << (BITS - 1)))[:, None] * total[None, :]
            zero = next_zero
        sums += part * scale.to(tl.float32)[:, None]
        scale = next_scale
    return sums


def _operands(matrix: PackedExperts, dtype: torch.dtype, scale: Tensor | None) -> Operands:
    weight: IntWeight = matrix.first
    tensors = matrix.tensors
    zero = tensors.get("zero")
    codes, order = tensors["codes"], tensors.get("order")
    in_pairs = (IN_PAIRS or codes.is_cuda) and dtype == torch.bfloat16
    form = weight.bits, weight.group, zero is not None, order is not None, in_pairs
    given = (
        codes,
        tensors["scale"],
        codes if zero is None else zero,
        codes if order is None else order,
    )
    # Each half of 4 bits has 16 columns, the fewest that a product takes.
    most, least = weight.group & -weight.group, 32 if weight.bits == 4 else 16
    return Operands(given, tuple(map(int, form)), most, least)


# As swept with Qwen3-30B-A3B's experts, groups of 128, on an H200
# (benchmarks/kernels/packed_experts.py).
_GATE_UP, _DOWN = Tile(16, 64, 128, 4, 3), Tile(16, 128, 128, 2, 3)
_MANY = Tiles(Tile(64, 64, 128, 4, 3), Tile(64, 128, 128, 4, 3))
_TILES = replace(
    PACKED,
    few=(
        (3.0, Tiles(replace(_GATE_UP, warps=2), _DOWN)),
        (0.25, Tiles(_GATE_UP, _DOWN)),
        (0.0, Tiles(_GATE_UP, replace(_DOWN, outs=64))),
    ),
    many=((24.0, _MANY), *PACKED.many[2:]),
)
FORMAT = ExpertFormat(IntWeight, _operands, _sums, tiles=_TILES)
