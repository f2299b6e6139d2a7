"""Granite 3 (IBM 2024), dense."""

from __future__ import annotations

from typing import Any, ClassVar

from specengine.layers.layer_spec import Multipliers
from specengine.target.models.llama import LlamaForCausalLM


class GraniteForCausalLM(LlamaForCausalLM):
    """Llama with embedding, residual stream, attention and logits scaled."""

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
