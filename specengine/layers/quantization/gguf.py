"""GGUF's Q4_0, Q4_1 and Q8_0, kept in their bits (--quantization gguf): 32 neighbours in a row have
a block, which begins with their scale d, float16.

q4_0: 16 bytes, whose low halves are the first 16 codes, w = (q - 8) d. q4_1: a least value m
behind d, then the same, w = q d + m. q8_0: 32 signed bytes, w = q d. Tensors of other types are
dequantised when they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from specengine.kernels.linear.quantised import INT4_CHUNK, IntWeight
from specengine.layers.quantization.method import LayerTensors, Quantization

_BLOCK = INT4_CHUNK
# Type, as leaf of a tensor's name -> bytes of a block.
KEPT: dict[str, int] = {"q4_0": 18, "q4_1": 20, "q8_0": 34}


class Gguf(Quantization):
    keeps_gguf: ClassVar[bool] = True

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Gguf:
        return cls()

    def read(self, layer: LayerTensors) -> IntWeight:
        kind = next((kind for kind in KEPT if layer.has(kind)), "weight")
        size, count = KEPT.get(kind, 1), layer.columns // _BLOCK
        raw = layer.shaped(kind, layer.rows, count * size).view(layer.rows, count, size)
        scale = raw[:, :, :2].contiguous().view(torch.float16)[:, :, 0].contiguous()
        if kind == "q8_0":
            codes = (raw[:, :, 2:].to(torch.int16) + 128 & 255).to(torch.uint8)
            return IntWeight(codes.flatten(1), scale, None, 8, _BLOCK)
        if kind == "q4_0":
            return IntWeight(raw[:, :, 2:].flatten(1), scale, None, 4, _BLOCK)
        least = raw[:, :, 2:4].contiguous().view(torch.float16)[:, :, 0].float()
        # A block of equal weights has d = 0 and codes 0: (0 - -1) * m is m.
        is_level = scale == 0
        zero = torch.where(is_level, -1.0, -least / torch.where(is_level, 1.0, scale.float()))
        scale = torch.where(is_level, least.to(scale.dtype), scale)
        return IntWeight(raw[:, :, 4:].flatten(1), scale, zero, 4, _BLOCK)

    def random(self, rows: int, columns: int, generator: torch.Generator) -> dict[str, Tensor]:
        device = generator.device
        size = rows, columns // _BLOCK, KEPT["q4_0"]
        raw = torch.randint(0, 256, size, generator=generator, device=device, dtype=torch.uint8)
        step = torch.full((1,), 0.02 / 4.6, dtype=torch.float16, device=device)
        raw[:, :, :2] = step.view(torch.uint8)
        return {"q4_0": raw.flatten(1)}
