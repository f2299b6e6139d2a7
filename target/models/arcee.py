"""AFM (Arcee AI 2025)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from specengine.layers.layer_spec import LayerSpec
from specengine.runner.loader.family import GgufFormat
from specengine.runner.loader.gguf_fields import biases
from specengine.target.models.llama import LlamaForCausalLM


class ArceeForCausalLM(LlamaForCausalLM):
    """Llama with a feed-forward of squared ReLU without gate."""

    gguf: ClassVar[GgufFormat | None] = GgufFormat(
        ("arcee",),
        "arcee",
        has_rotary_pairs=True,
        fields=lambda file: {
            "hidden_act": "relu2",
            **biases(file, attention_bias="attn_q", mlp_bias="ffn_up"),
        },
    )

    @classmethod
    def layer_spec(cls, config: Any) -> LayerSpec:
        return replace(super().layer_spec(config), gated_mlp=False)
