"""MXFP4 as GPT-OSS has it: experts alone are quantised (`blocks` [N, K / 32, 16] and `scales`
[N, K / 32] of each product, as kernels/linear/mxfp4.py reads them). Linear layers stay in floating
point."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specengine.kernels.linear.mxfp4 import BLOCK, Mxfp4Weight
from specengine.layers.quantization.method import LayerTensors, Quantization

_EXPONENT = 119  # 2 ** -8: values of e2m1 have a deviation of about 3


class Mxfp4(Quantization):
    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Mxfp4:
        return cls()

    def read(self, layer: LayerTensors) -> Mxfp4Weight:
        if not layer.has("blocks") and not layer.has("scales"):
            there = ", ".join(sorted(layer.tensors))
            raise layer.refused(f"is quantised ({there}); of MXFP4 experts alone are read")
        if layer.columns % BLOCK:
            raise layer.refused(f"has {layer.columns} inputs, no multiple of {BLOCK}")
        groups = layer.columns // BLOCK
        blocks = layer.shaped("blocks", layer.rows, groups, BLOCK // 2)
        return Mxfp4Weight.of(blocks, layer.shaped("scales", layer.rows, groups))

    def random(self, rows: int, columns: int, generator: torch.Generator) -> dict[str, Tensor]:
        weight = torch.empty(rows, columns, device=generator.device)
        return {"weight": weight.normal_(0.0, 0.02, generator=generator)}

    def random_expert(
        self, rows: int, columns: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        device, groups = generator.device, columns // BLOCK
        size = rows, groups, BLOCK // 2
        blocks = torch.randint(0, 256, size, generator=generator, device=device, dtype=torch.uint8)
        scales = torch.full((rows, groups), _EXPONENT, dtype=torch.uint8, device=device)
        return {"blocks": blocks, "scales": scales}
