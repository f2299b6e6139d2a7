"""GLM-4 (arXiv:2406.12793), dense: GLM-4-9B (`glm`) and GLM-4-0414 (`glm4`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from specengine.layers.layer_spec import LayerSpec
from specengine.layers.rotary import rotary_fraction
from specengine.runner.loader.family import GgufFormat
from specengine.runner.loader.gguf_fields import biases
from specengine.target.models.llama import LlamaForCausalLM

# q, k and v are separate or merged.
_GGUF_TENSORS = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}


class GlmForCausalLM(LlamaForCausalLM):
    """Biases on q, k and v; half of a head rotated, in neighbouring pairs."""

    gguf: ClassVar[GgufFormat | None] = GgufFormat(
        ("chatglm",),
        "glm",
        tensors=_GGUF_TENSORS,
        fields=lambda file: {
            "attention_bias": any(biases(file, q="attn_q", all="attn_qkv").values())
        },
    )
    has_rotary_pairs: ClassVar[bool] = True
    small_config: ClassVar[dict[str, Any]] = {
        "attention_bias": True,
        "head_dim": 32,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
        },
    }

    @classmethod
    def layer_spec(cls, config: Any) -> LayerSpec:
        return LayerSpec.from_config(
            config,
            qkv_bias=bool(config.attention_bias),
            rotary_fraction=rotary_fraction(config),
        )


class Glm4ForCausalLM(GlmForCausalLM):
    """GLM with norms behind attention and feed-forward too."""

    gguf: ClassVar[GgufFormat | None] = GgufFormat(
        ("glm4",),
        "glm4",
        tensors={
            **_GGUF_TENSORS,
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        fields=lambda file: biases(file, attention_bias="attn_q"),
    )
    tensor_names: ClassVar[Mapping[str, str]] = {
        "post_self_attn_layernorm": "attention_out_norm",
        "post_mlp_layernorm": "mlp_out_norm",
    }

    @classmethod
    def layer_spec(cls, config: Any) -> LayerSpec:
        return replace(super().layer_spec(config), norm_places="around")
