"""MXFP4 as GPT-OSS has it: experts alone are quantised (`*_blocks`, `*_scales`), which a layer of
experts reads with kernels/linear/mxfp4.py. Linear layers stay in floating point."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specengine.layers.quantization.method import LayerTensors, QuantisedWeight, Quantization


class Mxfp4(Quantization):
    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Mxfp4:
        return cls()

    def read(self, layer: LayerTensors) -> QuantisedWeight:
        there = ", ".join(sorted(layer.tensors))
        raise layer.refused(f"is quantised ({there}); of MXFP4 experts alone are read")

    def random(self, rows: int, columns: int, generator: torch.Generator) -> dict[str, Tensor]:
        weight = torch.empty(rows, columns, device=generator.device)
        return {"weight": weight.normal_(0.0, 0.02, generator=generator)}
