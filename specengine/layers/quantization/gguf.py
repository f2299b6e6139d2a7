"""GGUF's blocks, kept in 4 or 8 bits (--quantization gguf).

32 neighbours in a row have a block, which begins with their scale d, float16. q4_0: 16 bytes, whose
low halves are the first 16 codes, w = (q - 8) d. q4_1: a least value m behind d, then the same,
w = q d + m. q5_0 and q5_1: before these bytes 4 more with a fifth bit each, w = (q - 16) d and
q d + m. q8_0: 32 signed bytes, w = q d. mxfp4: an exponent and 16 bytes; of experts alone.

K-quants have super-blocks of 256. q4_k and q5_k: d and m, then 12 bytes with 6 bits of scale s and
of least value l for each 32, w = q d s - m l. q6_k: a signed byte of scale s for each 16, w =
(q - 32) d s. Codes of 5 and 6 bits become 8; scales of K-quants become float32, which is exact.
Tensors of other types are dequantised when they are read. A matrix may come with a `column_order`,
int64 [columns]: the layer's input j multiplies the file's column column_order[j].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from specengine.kernels.linear.linear_format import QuantisedWeight
from specengine.kernels.linear.mxfp4 import Mxfp4Weight
from specengine.kernels.linear.quantised import IntWeight, pack_int4
from specengine.layers.quantization.method import LayerTensors, Quantization


def _half(raw: Tensor, at: int) -> Tensor:
    """uint8 [rows, blocks, bytes] -> float32 [rows, blocks], the float16 that begins at a byte."""
    return raw[:, :, at : at + 2].contiguous().view(torch.float16)[:, :, 0].float()


def _halves(packed: Tensor) -> Tensor:
    """uint8 [..., n] -> [..., 2 n], the low 4 bits of all, then the high ones."""
    return torch.cat([packed & 15, packed >> 4], -1)


def _bits(packed: Tensor, places: range) -> Tensor:
    """uint8 [..., n] -> [..., len(places), n], one bit of each byte."""
    shifts = torch.tensor(list(places), dtype=torch.uint8, device=packed.device)
    return packed.unsqueeze(-2) >> shifts[:, None] & 1


def _symmetric(codes: Tensor, scale: Tensor, bits: int) -> IntWeight:
    """codes: uint8 [rows, groups, group], of which 2 ** (bits - 1) stands for 0; scale: [rows,
    groups]."""
    packed = pack_int4(codes.flatten(1)) if bits == 4 else codes.flatten(1)
    return IntWeight(packed, scale, None, bits, codes.shape[2])


def _from_least(codes: Tensor, scale: Tensor, least: Tensor, bits: int) -> IntWeight:
    """w = code * scale + least. Where the scale is 0 all are `least`: (0 - -1) * least is that."""
    is_level = scale == 0
    codes = torch.where(is_level.unsqueeze(-1), 0, codes)
    zero = torch.where(is_level, -1.0, -least / torch.where(is_level, 1.0, scale))
    packed = pack_int4(codes.flatten(1)) if bits == 4 else codes.flatten(1)
    return IntWeight(packed, torch.where(is_level, least, scale), zero, bits, codes.shape[2])


def _q4_0(raw: Tensor) -> IntWeight:
    return _symmetric(_halves(raw[:, :, 2:]), _half(raw, 0).half(), 4)


def _q4_1(raw: Tensor) -> IntWeight:
    return _from_least(_halves(raw[:, :, 4:]), _half(raw, 0), _half(raw, 2), 4)


def _fifth_bits(raw: Tensor, at: int) -> Tensor:
    """Codes of 5 bits, [rows, blocks, 32]: 4 bytes with the upper bits, then 16."""
    upper = _bits(raw[:, :, at : at + 4], range(8)).transpose(-1, -2).flatten(-2)
    return _halves(raw[:, :, at + 4 :]) | upper << 4


def _q5_0(raw: Tensor) -> IntWeight:
    return _symmetric(_fifth_bits(raw, 2) + 112, _half(raw, 0).half(), 8)


def _q5_1(raw: Tensor) -> IntWeight:
    return _from_least(_fifth_bits(raw, 4), _half(raw, 0), _half(raw, 2), 8)


def _q8_0(raw: Tensor) -> IntWeight:
    return _symmetric(raw[:, :, 2:] ^ 128, _half(raw, 0).half(), 8)


def _scales_of_32(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and least value of each 32, [rows, 8 blocks]: 6 bits each of 12 bytes. The first four
    of both have a byte each; of the others 4 bits lie in the last four bytes, the upper 2 above the
    first eight."""
    packed = raw[:, :, 4:16]
    first, second, last = packed[:, :, :4], packed[:, :, 4:8], packed[:, :, 8:]
    scale = torch.cat([first & 63, last & 15 | first >> 6 << 4], -1)
    least = torch.cat([second & 63, last >> 4 | second >> 6 << 4], -1)
    d, m = _half(raw, 0).unsqueeze(-1), _half(raw, 2).unsqueeze(-1)
    return (scale * d).flatten(1), (-(least * m)).flatten(1)


def _chunks_of_64(packed: Tensor) -> Tensor:
    """uint8 [rows, blocks, 128] -> codes [rows, blocks, 8, 32]: of 32 bytes the low halves, then
    the high ones."""
    return _halves(packed.reshape(*packed.shape[:2], 4, 32)).view(*packed.shape[:2], 8, 32)


def _q4_k(raw: Tensor) -> IntWeight:
    return _from_least(_chunks_of_64(raw[:, :, 16:]).flatten(1, 2), *_scales_of_32(raw), 4)


def _q5_k(raw: Tensor) -> IntWeight:
    codes = _chunks_of_64(raw[:, :, 48:]) | _bits(raw[:, :, 16:48], range(8)) << 4
    return _from_least(codes.flatten(1, 2), *_scales_of_32(raw), 8)


def _q6_k(raw: Tensor) -> IntWeight:
    """Two halves of 128: 64 bytes of the lower 4 bits, 32 of the upper 2."""
    low = _halves(raw[:, :, :128].reshape(*raw.shape[:2], 2, 64))  # [rows, blocks, 2, 128]
    packed = raw[:, :, 128:192].reshape(*raw.shape[:2], 2, 32)
    high = torch.cat([packed >> shift & 3 for shift in (0, 2, 4, 6)], -1)
    codes = (low | high << 4) + 96
    scale = raw[:, :, 192:208].contiguous().view(torch.int8) * _half(raw, 208).unsqueeze(-1)
    return _symmetric(codes.view(len(raw), -1, 16), scale.flatten(1), 8)


def _mxfp4(raw: Tensor) -> Mxfp4Weight:
    return Mxfp4Weight(raw[:, :, 1:].flatten(1), raw[:, :, 0].contiguous())


@dataclass(frozen=True)
class _Type:
    size: int  # bytes of a block
    columns: int  # of a block
    read: Callable[[Tensor], QuantisedWeight]  # of uint8 [rows, blocks, size]


_TYPES: dict[str, _Type] = {
    "q4_0": _Type(18, 32, _q4_0),
    "q4_1": _Type(20, 32, _q4_1),
    "q5_0": _Type(22, 32, _q5_0),
    "q5_1": _Type(24, 32, _q5_1),
    "q8_0": _Type(34, 32, _q8_0),
    "q4_k": _Type(144, 256, _q4_k),
    "q5_k": _Type(176, 256, _q5_k),
    "q6_k": _Type(210, 256, _q6_k),
    "mxfp4": _Type(17, 32, _mxfp4),
}
# Types, as leaves of tensors' names, in which experts stay, and other layers.
KEPT_OF_EXPERTS = frozenset(_TYPES)
KEPT = KEPT_OF_EXPERTS - {"mxfp4"}
COLUMN_ORDER = "column_order"


class Gguf(Quantization):
    keeps_gguf: ClassVar[bool] = True

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Gguf:
        return cls()

    def read(self, layer: LayerTensors) -> QuantisedWeight:
        kind = next((kind for kind in _TYPES if layer.has(kind)), None)
        if kind is None:
            raise layer.refused(f"has {', '.join(sorted(layer.tensors))} and no block of GGUF's")
        found = _TYPES[kind]
        if layer.columns % found.columns:
            raise layer.refused(f"has {layer.columns} inputs, no multiple of {found.columns}")
        blocks = layer.columns // found.columns
        raw = layer.shaped(kind, layer.rows, blocks * found.size)
        made = found.read(raw.view(layer.rows, blocks, found.size))
        if isinstance(made, IntWeight) and layer.has(COLUMN_ORDER):
            return made.in_order(layer.shaped(COLUMN_ORDER, layer.columns))
        return made

    def random(self, rows: int, columns: int, generator: torch.Generator) -> dict[str, Tensor]:
        device, found = generator.device, _TYPES["q4_0"]
        size = rows, columns // found.columns, found.size
        raw = torch.randint(0, 256, size, generator=generator, device=device, dtype=torch.uint8)
        step = torch.full((1,), 0.02 / 4.6, dtype=torch.float16, device=device)
        raw[:, :, :2] = step.view(torch.uint8)
        return {"q4_0": raw.flatten(1)}
