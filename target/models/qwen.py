"""Qwen2 and Qwen3, dense."""

from __future__ import annotations

from typing import Any, ClassVar

from specengine.layers.layer_spec import LayerSpec
from specengine.runner.loader.family import GgufFormat
from specengine.target.models.layer_types import typed_windows
from specengine.target.models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Biases on q, k and v; a sliding window in the layers that the configuration marks."""

    gguf: ClassVar[GgufFormat | None] = GgufFormat(("qwen2", "qwen2vl"), "qwen2")
    language_parts: ClassVar[tuple[str, ...]] = ("qwen2_vl_text", "qwen2_5_vl_text")

    @classmethod
    def layer_spec(cls, config: Any) -> LayerSpec:
        return LayerSpec.from_config(config, qkv_bias=True)

    @classmethod
    def sliding_windows(cls, config: Any) -> list[int | None]:
        return typed_windows(config)


class Qwen3ForCausalLM(Qwen2ForCausalLM):
    """Heads of q and k normalised; biases only where the configuration says so."""

    gguf: ClassVar[GgufFormat | None] = GgufFormat(("qwen3", "qwen3vl"), "qwen3")
    language_parts: ClassVar[tuple[str, ...]] = ("qwen3_vl_text",)
    small_config: ClassVar[dict[str, Any]] = {"head_dim": 32, "tie_word_embeddings": True}

    @classmethod
    def layer_spec(cls, config: Any) -> LayerSpec:
        bias = bool(config.attention_bias)
        return LayerSpec.from_config(config, qk_norm=True, qkv_bias=bias, o_bias=bias)
