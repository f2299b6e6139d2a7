"""Granite 3 (IBM 2024), dense."""

from __future__ import annotations

from typing import Any, ClassVar

from specengine.layers.layer_spec import Multipliers
from specengine.runner.loader.family import GgufFormat
from specengine.runner.loader.gguf_fields import biases
from specengine.target.models.llama import LlamaForCausalLM

# Key -> field, of all models of the family.
GGUF_SCALES = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


class GraniteForCausalLM(LlamaForCausalLM):
    """Llama with embedding, residual stream, attention and logits scaled."""

    gguf: ClassVar[GgufFormat | None] = GgufFormat(
        ("granite",),
        "granite",
        has_rotary_pairs=True,
        metadata=GGUF_SCALES,
        fields=lambda file: biases(file, attention_bias="attn_q", mlp_bias="ffn_gate"),
    )
    small_config: ClassVar[dict[str, Any]] = {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.4,
        "logits_scaling": 6.0,
    }

    @classmethod
    def multipliers(cls, config: Any) -> Multipliers:
        return Multipliers(
            embedding=config.embedding_multiplier,
            residual=config.residual_multiplier,
            attention=config.attention_multiplier,
            logits=1 / config.logits_scaling,
        )
