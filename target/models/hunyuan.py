"""Hunyuan, dense (Tencent 2025)."""

from __future__ import annotations

from typing import Any, ClassVar

from specengine.layers.layer_spec import LayerSpec
from specengine.runner.loader.family import GgufFormat
from specengine.runner.loader.gguf_fields import biases
from specengine.target.models.llama import LlamaForCausalLM


class HunYuanDenseV1ForCausalLM(LlamaForCausalLM):
    """Heads of q and k normalised behind the rotation, whose base a fixed `alpha` stretches."""

    # The base that files state is the stretched one.
    gguf: ClassVar[GgufFormat | None] = GgufFormat(
        ("hunyuan-dense",),
        "hunyuan_v1_dense",
        fields=lambda file: biases(file, attention_bias="attn_q"),
    )
    tensor_names: ClassVar[dict[str, str]] = {
        "query_layernorm": "q_norm",
        "key_layernorm": "k_norm",
    }
    small_config: ClassVar[dict[str, Any]] = {
        "head_dim": 32,
        "rope_parameters": {
            "rope_type": "dynamic",
            "rope_theta": 1e4,
            "factor": 1.0,
            "alpha": 50.0,
        },
    }

    @classmethod
    def layer_spec(cls, config: Any) -> LayerSpec:
        bias = bool(config.attention_bias)
        return LayerSpec.from_config(config, qk_norm_rotated=True, qkv_bias=bias, o_bias=bias)
