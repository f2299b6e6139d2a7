"""EXAONE 4.0 (arXiv:2507.11407)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from specengine.layers.layer_spec import LayerSpec
from specengine.runner.loader.family import GgufFormat
from specengine.runner.loader.gguf_fields import WINDOW
from specengine.runner.loader.gguf_fields import layer_types as gguf_layer_types
from specengine.target.models.layer_types import layer_types, typed_windows, with_rotation
from specengine.target.models.llama import LlamaForCausalLM


class Exaone4ForCausalLM(LlamaForCausalLM):
    """Norms behind attention and feed-forward alone, heads of q and k normalised. Where some layers
    have windows, the others do not rotate."""

    gguf: ClassVar[GgufFormat | None] = GgufFormat(
        ("exaone4",),
        "exaone4",
        tensors={
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        optional={WINDOW: "sliding_window"},
        fields=lambda file: {"layer_types": gguf_layer_types(file, period=4)},
    )
    tensor_names: ClassVar[Mapping[str, str]] = {
        "post_attention_layernorm": "attention_out_norm",
        "post_feedforward_layernorm": "mlp_out_norm",
    }
    small_config: ClassVar[dict[str, Any]] = {
        "sliding_window": 48,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }

    @classmethod
    def layer_spec(cls, config: Any) -> LayerSpec:
        return LayerSpec.from_config(config, norm_places="after", qk_norm=True)

    @classmethod
    def sliding_windows(cls, config: Any) -> list[int | None]:
        return typed_windows(config)

    @classmethod
    def layer_specs(cls, config: Any) -> list[LayerSpec]:
        has_windows = config.sliding_window is not None
        types = layer_types(config)
        rotates = [not has_windows or kind == "sliding_attention" for kind in types]
        return with_rotation(super().layer_specs(config), rotates)
