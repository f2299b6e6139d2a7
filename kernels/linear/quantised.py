"""Weights of linear layers in 8 and 4 bits, as the products of this folder read them.

Whatever a checkpoint packs becomes one of these, or mxfp4.py's (layers/quantization).
linear_format.py says what linear layers ask of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
INT4_CHUNK = 32  # columns that 16 neighbouring bytes of 4-bit codes hold


@dataclass(frozen=True)
class Fp8Input:
    """How a product rounds its input rows to e4m3 before it multiplies. scale: float32 [1], the
    published one; None: each row's own, the largest magnitude of every `group` columns / 448."""

    scale: Tensor | None = None
    group: int | None = None  # None: of the whole row


@dataclass(frozen=True)
class Fp8Weight:
    """w[n, k] = codes[n, k] * scale[n // rows, k // columns].

    codes: float8_e4m3fn [N, K]; scale: float32 [ceil(N / rows), ceil(K / columns)]. input: None
    where rows of activations are multiplied as they are.
    """

    codes: Tensor
    scale: Tensor
    rows: int
    columns: int
    input: Fp8Input | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def num_bytes(self) -> int:
        return _bytes(self.codes, self.scale)

    def dequantised(self) -> Tensor:
        """float32 [N, K]."""
        num_rows, num_columns = self.shape
        scale = self.scale.repeat_interleave(self.rows, 0)[:num_rows]
        scale = scale.repeat_interleave(self.columns, 1)[:, :num_columns]
        return self.codes.float() * scale

    def by_row(self) -> Fp8Weight:
        """The same weight with scales of its own for each row."""
        scale = self.scale.repeat_interleave(self.rows, 0)[: self.shape[0]]
        return replace(self, scale=scale.contiguous(), rows=1)

    def narrow(self, dim: int, start: int, size: int) -> Fp8Weight | None:
        """Some rows (dim 0) or some columns (dim 1). None: they begin or end amid a block of
        columns that has one scale."""
        num_rows, num_columns = self.shape
        codes = self.codes.view(torch.uint8).narrow(dim, start, size).contiguous().view(FP8)
        if dim == 0:
            if self.rows >= num_rows:  # one scale a column block
                return replace(self, codes=codes, rows=size)
            if start % self.rows or (size % self.rows and start + size != num_rows):
                return self.by_row().narrow(dim, start, size)
            last = -(-(start + size) // self.rows)
            return replace(self, codes=codes, scale=self.scale[start // self.rows : last])
        group = None if self.input is None else self.input.group
        if group is not None and not _is_aligned(start, size, group, num_columns):
            return None
        if self.columns >= num_columns:
            return replace(self, codes=codes, columns=size)
        if not _is_aligned(start, size, self.columns, num_columns):
            return None
        last = -(-(start + size) // self.columns)
        scale = self.scale[:, start // self.columns : last].contiguous()
        return replace(self, codes=codes, scale=scale)

    def take_rows(self, rows: Tensor) -> Fp8Weight:
        """Row i is this one's rows[i], int64. Each row gets a scale of its own where those of a
        block come out of several blocks; nothing is rounded."""
        codes = self.codes.view(torch.uint8).index_select(0, rows).view(FP8)
        if self.rows >= self.shape[0]:  # one scale a column block
            return replace(self, codes=codes, rows=len(rows))
        blocks = rows // self.rows
        first = blocks[:: self.rows]
        if not torch.equal(first.repeat_interleave(self.rows)[: len(rows)], blocks):
            return self.by_row().take_rows(rows)
        return replace(self, codes=codes, scale=self.scale.index_select(0, first))

    @classmethod
    def of(cls, weight: Tensor) -> Fp8Weight:
        """weight: [N, K], rounded with one scale a row; input rows are rounded with their own."""
        wide = weight.float()
        scale = (wide.abs().amax(1, keepdim=True) / FP8_MAX).clamp_min(1e-12)
        codes = (wide / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)
        return cls(codes, scale, 1, weight.shape[1], Fp8Input())


def join_fp8(parts: Sequence[Fp8Weight]) -> Fp8Weight | None:
    """Weights of one input as one, their rows one below the other. None where they differ in more
    than their numbers. Of several input scales the largest serves all, as it clips nothing."""
    first = parts[0]
    same = all(one.columns == first.columns for one in parts)
    if not same or len({_input_kind(one.input) for one in parts}) > 1:
        return None
    if any(one.rows != first.rows or one.shape[0] % one.rows for one in parts) or (
        first.rows == first.shape[0]
    ):
        parts = [one.by_row() for one in parts]
    given = [
        one.input.scale for one in parts if one.input is not None and one.input.scale is not None
    ]
    joined = first.input
    if joined is not None and given:
        joined = replace(joined, scale=torch.stack(given).amax(0))
    # torch.cat has no kernel for float8: bytes are bytes.
    codes = torch.cat([one.codes.view(torch.uint8) for one in parts]).view(FP8)
    return Fp8Weight(
        codes, torch.cat([p.scale for p in parts]), parts[0].rows, first.columns, joined
    )


def _input_kind(given: Fp8Input | None) -> tuple[bool, bool, int | None]:
    if given is None:
        return False, False, None
    return True, given.scale is not None, given.group


@dataclass(frozen=True)
class IntWeight:
    """w[n, order[j]] = (code[n, j] - zero[n, j // group]) * scale[n, j // group].

    codes: uint8; for 8 bits [N, K]; for 4 bits [N, K / 2], where of each 16 bytes the low halves
    are 16 columns and the high halves the 16 behind them. scale: floating point [N, K / group].
    zero: uint8, or float32 where it is no whole number, of scale's shape; None is 2 ** (bits - 1).
    order: int64 [K], the input that each column of codes multiplies; None is its own.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    bits: int
    group: int
    order: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] * 8 // self.bits

    @property
    def num_bytes(self) -> int:
        return _bytes(self.codes, self.scale, self.zero)

    @property
    def middle(self) -> int:
        """The zero of a weight that brings none."""
        return 1 << (self.bits - 1)

    @classmethod
    def pack(
        cls,
        codes: Tensor,
        scale: Tensor,
        zero: Tensor | None,
        bits: int,
        order: Tensor | None = None,
    ) -> IntWeight:
        """codes: uint8 [N, K], a code each."""
        group = codes.shape[1] // scale.shape[1]
        packed = pack_int4(codes) if bits == 4 else codes.contiguous()
        return cls(packed, scale.contiguous(), zero, bits, group, order)

    def unpacked(self) -> Tensor:
        """uint8 [N, K], in the order of the codes."""
        return unpack_int4(self.codes) if self.bits == 4 else self.codes

    def narrow(self, dim: int, start: int, size: int) -> IntWeight | None:
        """Some rows (dim 0) or some columns (dim 1). None: columns begin or end amid a group, or
        are in another order, or are no multiple of 32, by which products go."""
        if dim == 0:
            zero = None if self.zero is None else self.zero[start : start + size]
            codes, scale = (one[start : start + size] for one in (self.codes, self.scale))
            return replace(self, codes=codes, scale=scale, zero=zero)
        is_whole = self.group >= self.shape[1]  # one scale a row
        unit = max(INT4_CHUNK, 1 if is_whole else self.group)
        if self.order is not None or start % unit or size % unit:
            return None
        places = slice(start * self.bits // 8, (start + size) * self.bits // 8)
        if is_whole:
            return replace(self, codes=self.codes[:, places].contiguous(), group=size)
        groups = slice(start // self.group, (start + size) // self.group)
        zero = None if self.zero is None else self.zero[:, groups].contiguous()
        codes, scale = self.codes[:, places].contiguous(), self.scale[:, groups].contiguous()
        return replace(self, codes=codes, scale=scale, zero=zero)

    def take_rows(self, rows: Tensor) -> IntWeight:
        """Row i is this one's rows[i], int64."""
        zero = None if self.zero is None else self.zero.index_select(0, rows)
        codes, scale = (one.index_select(0, rows) for one in (self.codes, self.scale))
        return replace(self, codes=codes, scale=scale, zero=zero)

    def in_order(self, columns: Tensor) -> IntWeight:
        """The same rows with other columns: column j is this one's columns[j], int64 [K]. Of a
        weight without `order`. Where groups stay together codes are moved, else the result has an
        `order`."""
        assert self.order is None
        groups = columns.view(-1, self.group)
        first = groups[:, 0]
        together = first[:, None] + torch.arange(self.group, device=columns.device)
        if bool((first % self.group).any()) or not torch.equal(groups, together):
            return replace(self, order=columns.argsort())
        codes, which = self.unpacked().index_select(1, columns), first // self.group
        zero = None if self.zero is None else self.zero.index_select(1, which)
        return IntWeight.pack(codes, self.scale.index_select(1, which), zero, self.bits)

    def dequantised(self) -> Tensor:
        """float32 [N, K], in the order of the inputs."""
        rows, columns = self.shape
        codes = self.unpacked().float().view(rows, -1, self.group)
        zero = float(self.middle) if self.zero is None else self.zero.float()[:, :, None]
        weight = ((codes - zero) * self.scale.float()[:, :, None]).view(rows, columns)
        return (
            weight
            if self.order is None
            else torch.empty_like(weight).index_copy_(1, self.order, weight)
        )


def join_int(parts: Sequence[IntWeight]) -> IntWeight | None:
    """Weights of one input as one, their rows one below the other. None where they differ in more
    than their numbers."""
    first = parts[0]
    for one in parts[1:]:
        same_zero = (one.zero is None) == (first.zero is None)
        same_form = (one.bits, one.group) == (first.bits, first.group)
        if not (same_zero and same_form and _same(one.order, first.order)):
            return None
    zeros = [one.zero for one in parts if one.zero is not None]
    return replace(
        first,
        codes=torch.cat([one.codes for one in parts]),
        scale=torch.cat([one.scale for one in parts]),
        zero=torch.cat(zeros) if zeros else None,
    )


def pack_int4(codes: Tensor) -> Tensor:
    """uint8 [N, K] below 16 -> [N, K / 2], as IntWeight holds them; K is a multiple of 32."""
    halves = codes.view(len(codes), -1, 2, INT4_CHUNK // 2)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(len(codes), -1)


def unpack_int4(packed: Tensor) -> Tensor:
    """The inverse of pack_int4."""
    chunks = packed.view(len(packed), -1, INT4_CHUNK // 2)
    return torch.stack([chunks & 15, chunks >> 4], 2).reshape(len(packed), -1)


def _is_aligned(start: int, size: int, unit: int, whole: int) -> bool:
    return start % unit == 0 and (size % unit == 0 or start + size == whole)


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)


def _bytes(*tensors: Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
