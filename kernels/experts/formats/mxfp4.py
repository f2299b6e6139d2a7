"""Experts in MXFP4: 4 bits (e2m1), and a power of 2 for each 32 columns. A weight is exact in every
type of inputs, so that sums are those of the dense product.

Weights are kept as kernels/linear/mxfp4_words.py says: what a program loads of them lies in its
threads as the processor's product takes it, two of them in a register.
"""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specengine.kernels.experts import mxfp4_cuda
from specengine.kernels.experts.packed import ExpertFormat, Operands, PackedExperts, Wide
from specengine.kernels.experts.tiles import Tile, Tiles, TileTable
from specengine.kernels.linear import mxfp4_words
from specengine.kernels.linear.mxfp4 import Mxfp4Weight
from specengine.kernels.linear.mxfp4_words import Mxfp4Words
from specengine.kernels.sizes import cdiv

_CHUNK: tl.constexpr = tl.constexpr(mxfp4_words.CHUNK)
_PAIR: tl.constexpr = tl.constexpr(mxfp4_words.PAIR)
_FREE: tl.constexpr = tl.constexpr(mxfp4_words.FREE)
_REST: tl.constexpr = tl.constexpr(0xFFFFFFFF ^ mxfp4_words.FREE)
# Weights are multiplied times 2 ** -SHIFT; as float16, which has no such, times 2.
_BACK: tl.constexpr = tl.constexpr(2.0**mxfp4_words.SHIFT)
# Whether weights are widened in pairs without a card, too. Triton's interpreter cannot do so; a
# test that only compiles the kernel can.
IN_PAIRS = False


@triton.jit
def _turned(word, COUNT: tl.constexpr):
    return (word << COUNT) | (word >> (32 - COUNT))


@triton.jit
def _weights(pair, factor, WIDE: tl.constexpr, IN_PAIRS: tl.constexpr):
    """The two weights of a pair, last: [...] -> [..., 2]. factor: a bfloat16 in both halves of a
    word. In pairs: times 2 ** -SHIFT, as bfloat16."""
    pair &= _PAIR
    if IN_PAIRS:
        pair = tl.inline_asm_elementwise(
            "mul.rn.bf16x2 $0, $1, $2;",
            "=r,r,r",
            [pair, factor],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
        low = (pair & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        high = (pair >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        wide = (factor << 16).to(tl.float32, bitcast=True)
        low = (pair << 16).to(tl.float32, bitcast=True) * wide
        high = (pair & 0xFFFF0000).to(tl.float32, bitcast=True) * wide
        if tl.float16 == WIDE:
            low = (low * _BACK * 2.0).to(tl.float16)
            high = (high * _BACK * 2.0).to(tl.float16)
    return tl.join(low, high)


@triton.jit
def _block(first, second, third, fourth, factor, WIDE: tl.constexpr, IN_PAIRS: tl.constexpr):
    """Pairs of q = 0 to 3 -> [..., 2 of a pair, 2 of q // 2, 2 of q % 2]."""
    even = tl.join(_weights(first, factor, WIDE, IN_PAIRS), _weights(third, factor, WIDE, IN_PAIRS))
    odd = tl.join(
        _weights(second, factor, WIDE, IN_PAIRS), _weights(fourth, factor, WIDE, IN_PAIRS)
    )
    return tl.join(even, odd)


@triton.jit
def _widened(words, factors, WIDE: tl.constexpr, IN_PAIRS: tl.constexpr):
    """words: uint32 [32 W, 2 halves of 16 rows, 4]; factors: uint32 [8 W, 2], four bytes each
    -> [16 W, 128]."""
    W: tl.constexpr = words.shape[0] // 32
    first, second = tl.split(tl.reshape(words, (8 * W, 4, 2, 2, 2)))
    joined = (first & _FREE) | ((second << 2) & _REST)
    place = tl.arange(0, 2)[None, None, None, :] * 16  # of the factor of an even block
    factor = tl.reshape(factors, (8 * W, 1, 2, 1))
    even = ((factor >> place) & 0xFF) * 0x00800080
    odd = ((factor >> (place + 8)) & 0xFF) * 0x00800080
    even, first = tl.broadcast(even, first)
    odd, second = tl.broadcast(odd, second)
    both = tl.join(
        _block(first, first << 4, _turned(first, 10), joined << 6, even, WIDE, IN_PAIRS),
        _block(second, second << 4, _turned(second, 10), _turned(joined, 12), odd, WIDE, IN_PAIRS),
    )
    # [W, g, t, half, block // 2, of a pair, q // 2, q % 2, block % 2]
    both = tl.reshape(both, (W, 8, 4, 2, 2, 2, 2, 2, 2))
    return tl.reshape(tl.permute(both, (0, 3, 1, 4, 8, 6, 7, 2, 5)), (16 * W, _CHUNK))


@triton.jit
def _repeated(values, COUNT: tl.constexpr):
    """[W, 2] -> [W * COUNT, 2], each of the first dimension COUNT times."""
    W: tl.constexpr = values.shape[0]
    return tl.reshape(tl.broadcast_to(values[:, None, :], (W, COUNT, 2)), (W * COUNT, 2))


@triton.jit
def _sums(
    x_ptr,
    rows,
    is_row,
    words_ptr,
    factor_ptr,
    unused_ptr,
    spare_ptr,
    expert,
    outs,
    is_out,
    num_outs,
    columns,
    part,
    PARTS: tl.constexpr,
    FORM: tl.constexpr,
    OUTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    WIDE: tl.constexpr = x_ptr.dtype.element_ty
    W: tl.constexpr = OUTS // 16
    CHUNKS: tl.constexpr = BLOCK_K // _CHUNK  # of a step
    chunks = tl.cdiv(columns, _CHUNK)
    steps = tl.cdiv(chunks, CHUNKS)
    begin = part * steps // PARTS * CHUNKS
    end = tl.minimum((part + 1) * steps // PARTS * CHUNKS, chunks)
    # Rows come in units of 8, of which all exist or none.
    unit = tl.min(tl.reshape(outs, (W, 2, 8)), axis=2) // 8
    is_unit = tl.max(tl.reshape(is_out.to(tl.int32), (W, 2, 8)), axis=2) > 0
    unit = tl.where(is_unit, unit, 0)
    pair = expert.to(tl.int64) * (num_outs // 16) + unit // 2
    unit = (pair * chunks + begin) * 2 + unit % 2
    # What lies in one thread is behind the dimension of threads, the first.
    lane = tl.arange(0, 32 * W) % 32
    words_at = words_ptr + _repeated(unit, 32)[:, :, None] * 128
    words_at += lane[:, None, None] * 4 + tl.arange(0, 4)[None, None, :]
    factors_at = factor_ptr + _repeated(unit, 8) * 8 + (tl.arange(0, 8 * W) % 8)[:, None]
    k = tl.arange(0, _CHUNK)
    inputs = x_ptr + rows.to(tl.int64)[None, :] * columns + begin * _CHUNK + k[:, None]
    sums = tl.zeros((OUTS, ROWS), tl.float32)
    for first in range(begin, end, CHUNKS):
        product = tl.zeros((OUTS, ROWS), tl.float32)
        for number in tl.static_range(CHUNKS):
            if CHUNKS == 1:
                words, factors = tl.load(words_at), tl.load(factors_at)
            else:
                is_chunk = (first + number + tl.arange(0, 1) < end)[:, None]
                words = tl.load(words_at + number * 256, mask=is_chunk[:, :, None], other=0)
                factors = tl.load(factors_at + number * 16, mask=is_chunk, other=0)
            taken = (k < columns - (first + number) * _CHUNK)[:, None] & is_row[None, :]
            x = tl.load(inputs + number * _CHUNK, mask=taken, other=0.0)
            w = _widened(
                words.to(tl.uint32, bitcast=True),
                factors.to(tl.uint32, bitcast=True),
                WIDE,
                FORM[0],
            )
            if FORM[0]:
                # Nothing, but Triton looks no further back for how many columns a thread holds: it
                # takes four for two of `_weights`, and moves all weights between threads.
                w = tl.inline_asm_elementwise(
                    "mov.b16 $0, $1;", "=h,h", [w], dtype=tl.bfloat16, is_pure=False, pack=1
                )
            product = tl.dot(w, x, product, input_precision="ieee")
        # A step's sums are scaled outside of its products, so that the compiler waits for them.
        # It else leaves the last ones running, and Triton 3.6 with its ptxas 12.8 widens the next
        # step's weights over those that they still read (tests/kernels/wgmma_waits.py).
        sums += product * (0.5 if tl.float16 == WIDE else _BACK)
        words_at += CHUNKS * 256
        factors_at += CHUNKS * 16
        inputs += BLOCK_K
    return sums


@triton.jit
def _widen_kernel(
    words_ptr,
    factor_ptr,
    out_ptr,
    num_outs,
    columns,
    W: tl.constexpr,
    IN_PAIRS: tl.constexpr,
):
    """A program has 16 W rows of one expert, and a chunk of columns."""
    chunk, block, expert = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    chunks = tl.cdiv(columns, _CHUNK)
    unit = tl.reshape(tl.arange(0, 2 * W), (W, 2))
    pair = expert * (num_outs // 16) + block * W + unit // 2
    unit = (pair * chunks + chunk) * 2 + unit % 2
    words_at = words_ptr + _repeated(unit, 32)[:, :, None] * 128
    words_at += (tl.arange(0, 32 * W) % 32)[:, None, None] * 4 + tl.arange(0, 4)[None, None, :]
    factors_at = factor_ptr + _repeated(unit, 8) * 8 + (tl.arange(0, 8 * W) % 8)[:, None]
    words = tl.load(words_at).to(tl.uint32, bitcast=True)
    factors = tl.load(factors_at).to(tl.uint32, bitcast=True)
    WIDE: tl.constexpr = tl.bfloat16 if IN_PAIRS else tl.float32
    made = _widened(words, factors, WIDE, IN_PAIRS).to(tl.float32) * _BACK
    row, k = block * (16 * W) + tl.arange(0, 16 * W), chunk * _CHUNK + tl.arange(0, _CHUNK)
    at = (expert * num_outs + row)[:, None] * columns + k[None, :]
    tl.store(out_ptr + at, made, mask=(k < columns)[None, :])


def _widen(matrix: PackedExperts, dtype: torch.dtype) -> Tensor:
    words, factor = matrix.tensors["words"], matrix.tensors["factor"].view(torch.int32)
    experts, rows, columns = matrix.shape
    out = torch.empty(experts, rows, columns, dtype=dtype, device=words.device)
    pairs = rows // mxfp4_words.ROWS
    own = pairs & -pairs  # of a program, so that all have as many
    width = min(own, 4)
    _widen_kernel[(cdiv(columns, mxfp4_words.CHUNK), pairs // width, experts)](
        words, factor, out, rows, columns, W=width, IN_PAIRS=IN_PAIRS or words.is_cuda
    )
    return out


def _operands(matrix: PackedExperts, dtype: torch.dtype, scale: Tensor | None) -> Operands:
    words, factor = matrix.tensors["words"], matrix.tensors["factor"]
    factor = factor.view(torch.int32)
    in_pairs = dtype == torch.bfloat16  # which the interpreter does not multiply
    return Operands(
        (words, factor, factor, factor), (int(in_pairs),), matrix.shape[2], mxfp4_words.CHUNK
    )


# A warp takes 16 rows of weights, so that these need no other place than they are loaded to.
_TILES = TileTable(
    few=((0.0, Tiles(Tile(16, 32, 128, 4, 4), Tile(16, 64, 256, 4, 3, registers=128))),),
    many=(
        (96.0, Tiles(Tile(128, 32, 128, 4, 3), Tile(128, 64, 128, 4, 3))),
        (24.0, Tiles(Tile(64, 32, 128, 4, 3), Tile(64, 64, 128, 4, 3))),
        (10.0, Tiles(Tile(32, 32, 128, 4, 3), Tile(32, 64, 128, 4, 3))),
        (0.0, Tiles(Tile(16, 32, 128, 4, 4), Tile(16, 64, 128, 4, 4))),
    ),
)
# From 400 rows of each of 32 experts, 3,200 of a prompt of GPT-OSS-20B, on an H200.
_WIDE = Wide(_widen, 400.0)
FORMAT = ExpertFormat(Mxfp4Weight, _operands, _sums, Mxfp4Words.of, _TILES, mxfp4_cuda, _WIDE)
