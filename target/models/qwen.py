"""Qwen2 and Qwen3, dense."""

from __future__ import annotations

from typing import Any

from specengine.layers.decoder import DecoderShape
from specengine.target.models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Biases on q, k and v; a sliding window in the layers that the configuration marks."""

    @classmethod
    def decoder_shape(cls, config: Any) -> DecoderShape:
        return DecoderShape.from_config(config, qkv_bias=True)

    @classmethod
    def sliding_windows(cls, config: Any) -> list[int | None]:
        window = config.sliding_window
        return [window if kind == "sliding_attention" else None for kind in config.layer_types]


class Qwen3ForCausalLM(Qwen2ForCausalLM):
    """Heads of q and k normalised; biases only where the configuration says so."""

    @classmethod
    def decoder_shape(cls, config: Any) -> DecoderShape:
        bias = bool(config.attention_bias)
        return DecoderShape.from_config(config, qk_norm=True, qkv_bias=bias, o_bias=bias)
