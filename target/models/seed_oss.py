"""Seed-OSS (ByteDance 2025)."""

from __future__ import annotations

from typing import Any, ClassVar

from specengine.layers.layer_spec import LayerSpec
from specengine.target.models.llama import LlamaForCausalLM


class SeedOssForCausalLM(LlamaForCausalLM):
    """Llama with biases on q, k and v, and elsewhere where the configuration says so."""

    small_config: ClassVar[dict[str, Any]] = {"attention_bias": True, "head_dim": 32}

    @classmethod
    def layer_spec(cls, config: Any) -> LayerSpec:
        return LayerSpec.from_config(
            config,
            qkv_bias=bool(config.attention_bias),
            o_bias=bool(config.attention_out_bias),
            mlp_bias=bool(config.mlp_bias),
        )
