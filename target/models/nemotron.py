"""Nemotron-4 and Minitron (arXiv:2402.16819, arXiv:2407.14679)."""

from __future__ import annotations

from typing import Any, ClassVar

from specengine.layers.layer_spec import LayerSpec
from specengine.layers.rotary import rotary_fraction
from specengine.runner.loader.family import GgufFormat
from specengine.runner.loader.gguf_fields import biases
from specengine.target.models.llama import LlamaForCausalLM


class NemotronForCausalLM(LlamaForCausalLM):
    """LayerNorm with gains stored less 1, a feed-forward of squared ReLU without gate, half of a
    head rotated."""

    gguf: ClassVar[GgufFormat | None] = GgufFormat(
        ("nemotron",),
        "nemotron",
        norm_offset=1.0,
        epsilon="norm_eps",
        fields=lambda file: {
            "hidden_act": "relu2",
            **biases(file, attention_bias="attn_q", mlp_bias="ffn_up"),
        },
    )
    small_config: ClassVar[dict[str, Any]] = {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
        },
    }

    @classmethod
    def layer_spec(cls, config: Any) -> LayerSpec:
        bias = bool(config.attention_bias)
        return LayerSpec.from_config(
            config,
            norm="layer_bias",
            norm_offset=1.0,
            rms_norm_eps=config.norm_eps,
            gated_mlp=False,
            rotary_fraction=rotary_fraction(config),
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=bool(config.mlp_bias),
        )
