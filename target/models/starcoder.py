"""StarCoder2 (arXiv:2402.19173)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from specengine.layers.layer_spec import LayerSpec
from specengine.target.models.llama import MistralForCausalLM


class Starcoder2ForCausalLM(MistralForCausalLM):
    """LayerNorm, a feed-forward without gate, biases everywhere."""

    tensor_names: ClassVar[Mapping[str, str]] = {"c_fc": "up_proj", "c_proj": "down_proj"}
    small_config: ClassVar[dict[str, Any]] = {"sliding_window": 48, "tie_word_embeddings": True}

    @classmethod
    def layer_spec(cls, config: Any) -> LayerSpec:
        bias = bool(config.use_bias)
        return LayerSpec.from_config(
            config,
            norm="layer_bias",
            rms_norm_eps=config.norm_epsilon,
            gated_mlp=False,
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=bias,
        )
