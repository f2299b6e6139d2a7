"""Scales of K and V in FP8, which quantised checkpoints may carry beside the weights.

Known names in a layer, one number each: `self_attn.k_scale`, `self_attn.attn.k_scale`,
`self_attn.k_proj.k_scale` (vLLM, ModelOpt, compressed-tensors) and `self_attn.k_proj.output_scale`,
and the same of v. K in memory times k_scale is K.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch import Tensor, nn

from specengine.core.errors import ModelLoadError
from specengine.layers.attention import attention_layers

_NAME = re.compile(
    r"(?:.*\.)?layers\.(\d+)\.self_attn\.(?:(?:attn\.|[kv]_proj\.)?([kv])_scale"
    r"|([kv])_proj\.output_scale)"
)


@dataclass
class KvScales:
    """by_layer: (layer, "k" or "v") -> scale. Without its scale a layer has 1."""

    by_layer: dict[tuple[int, str], float] = field(default_factory=dict)

    def taken_from(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same without scales of K and V, which are kept here. Raises ModelLoadError for one
        that is not a single number."""
        for name, tensor in weights:
            match = _NAME.fullmatch(name)
            if match is None:
                yield name, tensor
                continue
            if tensor.numel() != 1:
                raise ModelLoadError(
                    f"tensor {name} has shape {list(tensor.shape)}; of K and V one scale a layer "
                    "is supported"
                )
            self.by_layer[int(match[1]), match[2] or match[3]] = float(tensor)

    def apply(self, model: nn.Module) -> None:
        """Let each attention layer of the model use its own."""
        for layer in attention_layers(model):
            k, v = (self._of(layer.layer_id, which) for which in "kv")
            layer.use_kv_scales(k, v)

    def _of(self, layer: int, which: str) -> float:
        """Some writers leave 0 or less where nothing was measured."""
        found = self.by_layer.get((layer, which), 1.0)
        return found if found > 0 else 1.0
