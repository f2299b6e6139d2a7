"""Cohere 2: Command R7B, Command A (arXiv:2504.00698)."""

from __future__ import annotations

from typing import Any, ClassVar

from specengine.layers.layer_spec import LayerSpec, Multipliers
from specengine.runner.loader.family import GgufFormat
from specengine.runner.loader.gguf_fields import WINDOW
from specengine.runner.loader.gguf_fields import layer_types as gguf_layer_types
from specengine.target.models.layer_types import layer_types, typed_windows, with_rotation
from specengine.target.models.llama import LlamaForCausalLM


class Cohere2ForCausalLM(LlamaForCausalLM):
    """One LayerNorm, without bias, before attention and feed-forward side by side; only layers with
    a window rotate, in neighbouring pairs; logits scaled."""

    gguf: ClassVar[GgufFormat | None] = GgufFormat(
        ("cohere2",),
        "cohere2",
        epsilon="layer_norm_eps",
        metadata={"logit_scale": "logit_scale", WINDOW: "sliding_window"},
        fields=lambda file: {"layer_types": gguf_layer_types(file, period=4)},
    )
    has_rotary_pairs: ClassVar[bool] = True
    small_config: ClassVar[dict[str, Any]] = {
        "logit_scale": 0.25,
        "sliding_window": 48,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "tie_word_embeddings": True,
    }

    @classmethod
    def layer_spec(cls, config: Any) -> LayerSpec:
        bias = bool(config.attention_bias)
        return LayerSpec.from_config(
            config,
            norm="layer",
            rms_norm_eps=config.layer_norm_eps,
            norm_places="shared",
            qkv_bias=bias,
            o_bias=bias,
        )

    @classmethod
    def sliding_windows(cls, config: Any) -> list[int | None]:
        return typed_windows(config)

    @classmethod
    def layer_specs(cls, config: Any) -> list[LayerSpec]:
        rotates = [kind == "sliding_attention" for kind in layer_types(config)]
        return with_rotation(super().layer_specs(config), rotates)

    @classmethod
    def multipliers(cls, config: Any) -> Multipliers:
        return Multipliers(logits=config.logit_scale)
