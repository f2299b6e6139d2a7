"""Seed-OSS (ByteDance 2025)."""

from __future__ import annotations

from typing import Any, ClassVar

from specengine.layers.layer_spec import LayerSpec
from specengine.runner.loader.family import GgufFormat
from specengine.runner.loader.gguf_fields import biases
from specengine.target.models.llama import LlamaForCausalLM


class SeedOssForCausalLM(LlamaForCausalLM):
    """Llama with biases on q, k and v, and elsewhere where the configuration says so."""

    gguf: ClassVar[GgufFormat | None] = GgufFormat(
        ("seed_oss",),
        "seed_oss",
        tensors={"post_attention_norm": "post_attention_layernorm"},
        fields=lambda file: biases(
            file, attention_bias="attn_q", attention_out_bias="attn_output", mlp_bias="ffn_gate"
        ),
    )
    small_config: ClassVar[dict[str, Any]] = {"attention_bias": True, "head_dim": 32}

    @classmethod
    def layer_spec(cls, config: Any) -> LayerSpec:
        return LayerSpec.from_config(
            config,
            qkv_bias=bool(config.attention_bias),
            o_bias=bool(config.attention_out_bias),
            mlp_bias=bool(config.mlp_bias),
        )
