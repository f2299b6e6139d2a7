"""GPTQ (Frantar et al. 2022, arXiv:2210.17323) in 4 and 8 bits, as AutoGPTQ and GPTQModel write it.

`qweight` int32 [K * bits / 32, N], packed along the inputs, the lowest bits first; `qzeros`
[groups, N * bits / 32] along the outputs, each less by one than the zero in the first version of
the format (`checkpoint_format` "gptq"), the zero itself in "gptq_v2"; `scales` [groups, N]; `g_idx`
[K], the group of each input, which are in disorder with `desc_act` (act-order).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specengine.core.errors import ModelLoadError
from specengine.kernels.linear.quantised import IntWeight
from specengine.layers.quantization.int_codes import make_int, random_words, sort_groups
from specengine.layers.quantization.method import LayerTensors, Quantization, require, unpack_int32


class Gptq(Quantization):
    def __init__(self, bits: int, group_size: int, zero_offset: int) -> None:
        """group_size: inputs; -1 is all. zero_offset: what `qzeros` lack."""
        self.bits = bits
        self.group_size = group_size
        self.zero_offset = zero_offset

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Gptq:
        formats = ("gptq", "gptq_v2")
        require(fields, "gptq", bits=(4, 8), checkpoint_format=formats)
        for pattern, stated in (fields.get("dynamic") or {}).items():
            if not pattern.startswith("-:"):  # which leaves layers as they are
                raise ModelLoadError(
                    f"quantisation gptq: dynamic {pattern!r} states {stated} for some layers, "
                    "which is not supported; one number of bits and one group size are"
                )
        offset = 0 if fields.get("checkpoint_format") == "gptq_v2" else 1
        return cls(int(fields.get("bits", 4)), int(fields.get("group_size", 128)), offset)

    def read(self, layer: LayerTensors) -> IntWeight:
        word, rows, columns = 32 // self.bits, layer.rows, layer.columns
        if rows % word or columns % word:
            raise layer.refused(f"is [{rows}, {columns}], no multiples of {word}")
        size, groups = self._groups(columns)
        packed = layer.shaped("qweight", columns // word, rows)
        codes = unpack_int32(packed.T.contiguous(), self.bits)
        zero = unpack_int32(layer.shaped("qzeros", groups, rows // word), self.bits)
        zero = (zero + self.zero_offset) & ((1 << self.bits) - 1)
        scale = layer.shaped("scales", groups, rows).T.contiguous()
        order = None
        if layer.has("g_idx"):
            order = sort_groups(layer, layer.shaped("g_idx", columns), size)
        middle = 1 << (self.bits - 1)
        is_symmetric = bool((zero == middle).all())
        kept = None if is_symmetric else zero.T.contiguous()
        return make_int(layer, codes, scale, kept, self.bits, order)

    def random(self, rows: int, columns: int, generator: torch.Generator) -> dict[str, Tensor]:
        word, device = 32 // self.bits, generator.device
        size, groups = self._groups(columns)
        scales = torch.full((groups, rows), 0.02 / 2 ** (self.bits - 2), device=device)
        middle = sum(
            (1 << (self.bits - 1)) - self.zero_offset << i * self.bits for i in range(word)
        )
        signed = middle - (1 << 32) if middle >> 31 else middle
        return {
            "qweight": random_words(columns // word, rows, generator),
            "qzeros": torch.full((groups, rows // word), signed, dtype=torch.int32, device=device),
            "scales": scales.to(torch.float16),
            "g_idx": torch.arange(columns, dtype=torch.int32, device=device) // size,
        }

    def _groups(self, columns: int) -> tuple[int, int]:
        """Inputs of a group, and groups."""
        size = columns if self.group_size == -1 else self.group_size
        return size, -(-columns // size)
