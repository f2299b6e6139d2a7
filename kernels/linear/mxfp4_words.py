"""MXFP4 as tensor cores read it: each thread's codes in words that shifts and masks widen in pairs.

A pair is a word of two bfloat16: sign in bit 15, the code's three bits in bits 6 to 8, which is the
code's value times 2 ** -126. Two words hold sixteen codes, eight pairs: three in each word, turned
by PAIR_TURNS bits, and two in the bits that these leave, joined over both words. A product by one
power of 2 for each block of 32 then makes weights of them.

Rows are cut into pairs of units of 8, columns into chunks of 128: a unit's part of a chunk is 512
bytes, 16 for each of 32 threads. Thread (g, t) has row g, and of block b of its chunk the columns
32 b + 8 q + 2 t + (0, 1), q from 0 to 3: what it holds of the first operand of an m16n8k16 product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specengine.kernels.linear.mxfp4 import BLOCK, Mxfp4Weight, dequantise
from specengine.kernels.linear.quantised import unpack_int4

ROWS = 16  # two units
CHUNK = 128  # columns
PAIR_TURNS = (0, 4, 10)  # left, of a word, for its pairs of q = 0, 1, 2
JOIN_TURN = 2  # left, of a second word, whose left bits then fill what the first one's leave
JOINED_TURNS = (6, 12)  # left, of the joined word, for q = 3 of the even and of the odd block
PAIR = 0x81C081C0  # the bits of a pair
FREE = 0xFFFFFFFF & ~(0x81C081C0 | 0x081C081C | 0x70207020)  # of a first word
# A weight is kept times 2 ** -SHIFT, so that the power of 2 by which a pair is multiplied is one
# of bfloat16's.
SHIFT = 40
_AT_ONCE = 128  # pairs of units that are packed, which takes much more memory than they hold
_FACTOR = 126 - SHIFT  # a block's exponent of the factor, less that of its scale


@dataclass(frozen=True)
class Mxfp4Words:
    """w[n, k] = value of code[n, k] * 2 ** (factor[n, k // 32] - 253 + SHIFT).

    words: int32 [N / 16, C, 2, 8, 4, 4], C chunks of columns, the last filled with zeros. factor:
    uint8 [N / 16, C, 2, 8, 4], exponents of bfloat16: a scale's + 126 - SHIFT. columns: K.
    """

    words: Tensor
    factor: Tensor
    columns: int

    @classmethod
    def of(cls, weight: Mxfp4Weight) -> Mxfp4Words | None:
        """None: rows are no multiple of 16, or a scale of other than zeros is not within 2 ** -85
        to 2 ** 41, of which products would differ from those of dense weights."""
        rows, columns = weight.shape
        if rows % ROWS:
            return None
        chunks = -(-columns // CHUNK)
        codes = torch.zeros(rows, chunks * CHUNK, dtype=torch.uint8, device=weight.codes.device)
        codes[:, :columns] = unpack_int4(weight.codes)
        factor = weight.scale.to(torch.int32) + _FACTOR
        is_used = ((codes[:, :columns] & 7) > 0).view(rows, -1, BLOCK).any(-1)
        if bool((is_used & ((factor > 254) | (factor < 128))).any()):
            return None
        factor = torch.where(is_used, factor, 0)
        padded = codes.new_zeros(rows, chunks * 4)
        padded[:, : factor.shape[1]] = factor.to(torch.uint8)
        shape = (rows // ROWS, ROWS, chunks)
        parts = torch.split(codes.view(*shape, 4, 4, 4, 2), _AT_ONCE)
        return cls(
            torch.cat([_pack(part) for part in parts]),
            _halved(padded.view(*shape, 4).transpose(1, 2)),
            columns,
        )

    @property
    def shape(self) -> tuple[int, int]:
        return self.words.shape[0] * ROWS, self.columns

    @property
    def num_bytes(self) -> int:
        return self.words.numel() * 4 + self.factor.numel()

    def dequantised(self) -> Tensor:
        """float32 [N, K]."""
        rows = self.shape[0]
        parts = [_unpack(part) for part in torch.split(self.words, _AT_ONCE)]
        codes = torch.cat(parts).reshape(rows, -1, BLOCK // 2, 2)
        factor = self.factor.flatten(2, 3).transpose(1, 2).reshape(rows, -1).to(torch.int32)
        scales = torch.where(factor > 0, factor - _FACTOR, 0).to(torch.uint8)
        return dequantise(codes[..., 0] | codes[..., 1] << 4, scales)[:, : self.columns]


def _pack(codes: Tensor) -> Tensor:
    """uint8 [U, 16, C, block 4, q 4, t 4, 2] -> int32 [U, C, 2, 8, 4 t, 4]."""
    wide = codes.to(torch.int64)
    halves = (wide >> 3) << 15 | (wide & 7) << 6
    pairs = halves[..., 0] | halves[..., 1] << 16
    pairs = pairs.permute(0, 2, 1, 5, 3, 4)  # [U, C, 16, t, block, q]
    even, odd = pairs[..., 0::2, :], pairs[..., 1::2, :]
    joined = _turned(even[..., 3], -JOINED_TURNS[0]) | _turned(odd[..., 3], -JOINED_TURNS[1])
    first, second = joined & FREE, _turned(joined & ~FREE, -JOIN_TURN)
    for q, turn in enumerate(PAIR_TURNS):
        first = first | _turned(even[..., q], -turn)
        second = second | _turned(odd[..., q], -turn)
    words = _halved(torch.stack([first, second], -1).flatten(-2))
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _unpack(words: Tensor) -> Tensor:
    """The inverse: -> uint8 [U, 16, C, block 4, q 4, t 4, 2]."""
    wide = words.flatten(2, 3).to(torch.int64) & 0xFFFFFFFF
    first, second = wide[..., 0::2], wide[..., 1::2]
    joined = (first & FREE) | (_turned(second, JOIN_TURN) & ~FREE)
    blocks = [
        torch.stack([*(_turned(word, turn) for turn in PAIR_TURNS), _turned(joined, last)], -1)
        for word, last in ((first, JOINED_TURNS[0]), (second, JOINED_TURNS[1]))
    ]
    pairs = torch.stack(blocks, -2).flatten(-3, -2)  # [U, C, 16, t, block, q]
    halves = torch.stack([pairs & 0xFFFF, pairs >> 16], -1)
    codes = (halves >> 15 & 1) << 3 | (halves >> 6 & 7)
    return codes.permute(0, 2, 1, 4, 5, 3, 6).to(torch.uint8)


def _halved(rows: Tensor) -> Tensor:
    """[U, C, 16, ...] -> [U, C, 2, 8, ...], contiguous."""
    return rows.reshape(*rows.shape[:2], 2, 8, *rows.shape[3:]).contiguous()


def _turned(words: Tensor, count: int) -> Tensor:
    """32 bits each, `count` to the left."""
    count %= 32
    return (words << count | words >> (32 - count)) & 0xFFFFFFFF
