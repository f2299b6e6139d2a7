"""FP8 as NVIDIA's ModelOpt writes it: stated in `quantization_config` of config.json, or in
hf_quant_config.json alone, as `quantization`.

FP8: one `weight_scale` and one `input_scale` a layer. FP8_PER_CHANNEL_PER_TOKEN: a `weight_scale`
a row, inputs by their own. FP8_PB_WO: a `weight_scale` a block of 128 x 128, [N / 128, 1, K / 128,
1], inputs as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specengine.kernels.linear.quantised import Fp8Weight
from specengine.layers.quantization.fp8 import random_fp8, read_fp8
from specengine.layers.quantization.method import LayerTensors, Quantization, require

_BLOCK = (128, 128)
_STATIC, _ROWS, _BLOCKS = "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"


class ModelOpt(Quantization):
    def __init__(self, algorithm: str) -> None:
        self.algorithm = algorithm

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> ModelOpt:
        stated = {"quant_algo": None, **(fields.get("quantization") or fields)}
        require(stated, "modelopt", quant_algo=(_STATIC, _ROWS, _BLOCKS))
        return cls(stated["quant_algo"])

    def read(self, layer: LayerTensors) -> Fp8Weight:
        block = _BLOCK if self.algorithm == _BLOCKS else None
        return read_fp8(layer, block, self.algorithm == _STATIC, self.algorithm != _BLOCKS)

    def random(self, rows: int, columns: int, generator: torch.Generator) -> dict[str, Tensor]:
        block = _BLOCK if self.algorithm == _BLOCKS else None
        tensors = random_fp8(rows, columns, block, generator)
        if self.algorithm == _STATIC:
            tensors["input_scale"] = torch.full((), 0.05, device=generator.device)
        if self.algorithm == _ROWS:
            tensors["weight_scale"] = tensors["weight_scale"].expand(rows, 1).contiguous()
        return tensors
