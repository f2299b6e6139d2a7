"""AWQ (Lin et al. 2023, arXiv:2306.00978) in 4 bits, in the order of its "gemm" version.

`qweight` int32 [K, N / 8]: the eight columns of a word lie in the order 0, 2, 4, 6, 1, 3, 5, 7, the
lowest bits first; `qzeros` [K / group, N / 8] in the same order; `scales` [K / group, N].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specengine.kernels.linear.quantised import IntWeight
from specengine.layers.quantization.int_codes import make_int, random_words
from specengine.layers.quantization.method import LayerTensors, Quantization, require, unpack_int32

_BITS, _WORD = 4, 8
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word each of eight columns lies


class Awq(Quantization):
    def __init__(self, group_size: int, has_zeros: bool) -> None:
        """group_size: inputs; -1 is all."""
        self.group_size = group_size
        self.has_zeros = has_zeros

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Awq:
        require(fields, "awq", bits=(4,), w_bit=(4,), version=("gemm", "GEMM"))
        size = fields.get("group_size", fields.get("q_group_size", 128))
        return cls(int(size), bool(fields.get("zero_point", True)))

    def read(self, layer: LayerTensors) -> IntWeight:
        if layer.rows % _WORD:
            raise layer.refused(f"has {layer.rows} outputs, no multiple of {_WORD}")
        groups, words = self._groups(layer.columns), layer.rows // _WORD
        codes = _columns(layer.shaped("qweight", layer.columns, words))
        zero = _columns(layer.shaped("qzeros", groups, words)) if self.has_zeros else None
        layer.drop("qzeros")
        scale = layer.shaped("scales", groups, layer.rows).T.contiguous()
        return make_int(layer, codes, scale, zero, _BITS)

    def random(self, rows: int, columns: int, generator: torch.Generator) -> dict[str, Tensor]:
        groups = self._groups(columns)
        scales = torch.full((groups, rows), 0.02 / 6.5, device=generator.device)
        tensors = {
            "qweight": random_words(columns, rows // _WORD, generator),
            "scales": scales.to(torch.float16),
        }
        if self.has_zeros:
            tensors["qzeros"] = random_words(groups, rows // _WORD, generator)
        return tensors

    def _groups(self, columns: int) -> int:
        return 1 if self.group_size == -1 else -(-columns // self.group_size)


def _columns(packed: Tensor) -> Tensor:
    """int32 [n, N / 8] -> uint8 [N, n]."""
    codes = unpack_int32(packed, _BITS).view(len(packed), -1, _WORD)
    return codes[:, :, list(_PLACES)].flatten(1).T.contiguous()
