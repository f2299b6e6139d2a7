"""OLMo 2 (arXiv:2501.00656) and OLMo 3 (Ai2 2025), dense."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from specengine.layers.layer_spec import LayerSpec
from specengine.target.models.layer_types import typed_windows, with_rotary_kinds
from specengine.target.models.llama import LlamaForCausalLM


class Olmo2ForCausalLM(LlamaForCausalLM):
    """Norms behind attention and feed-forward alone; q and k normalised over all heads at once."""

    tensor_names: ClassVar[Mapping[str, str]] = {
        "post_attention_layernorm": "attention_out_norm",
        "post_feedforward_layernorm": "mlp_out_norm",
    }
    small_config: ClassVar[dict[str, Any]] = {}

    @classmethod
    def layer_spec(cls, config: Any) -> LayerSpec:
        bias = bool(config.attention_bias)
        return LayerSpec.from_config(
            config, norm_places="after", qk_norm_whole=True, qkv_bias=bias, o_bias=bias
        )


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    """OLMo 2 with windows and rotary tables by layer type."""

    small_config: ClassVar[dict[str, Any]] = {
        "sliding_window": 48,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "factor": 8.0,
                "rope_theta": 5e5,
                "original_max_position_embeddings": 64,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
        },
    }

    @classmethod
    def sliding_windows(cls, config: Any) -> list[int | None]:
        return typed_windows(config)

    @classmethod
    def layer_specs(cls, config: Any) -> list[LayerSpec]:
        return with_rotary_kinds(super().layer_specs(config), config)
