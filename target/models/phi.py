"""Phi-3 (arXiv:2404.14219) and what is published as Phi-3: Phi-3.5-mini, Phi-4, Phi-4-mini."""

from __future__ import annotations

from typing import Any, ClassVar

from specengine.layers.layer_spec import LayerSpec
from specengine.layers.rotary import rotary_fraction
from specengine.runner.loader.family import GgufFormat
from specengine.runner.loader.gguf_fields import window
from specengine.target.models.llama import MistralForCausalLM


class Phi3ForCausalLM(MistralForCausalLM):
    """Mistral, with merged tensors in checkpoints; part of a head rotated (Phi-4-mini), LongRoPE
    (128k) where the configuration says so."""

    gguf: ClassVar[GgufFormat | None] = GgufFormat(
        ("phi3",),
        "phi3",
        tensors={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        metadata={"rope.scaling.original_context_length": "original_max_position_embeddings"},
        fields=lambda file: {"sliding_window": window(file)},
    )
    small_config: ClassVar[dict[str, Any]] = {
        "sliding_window": 48,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0 + i / 8 for i in range(6)],
            "long_factor": [1.0 + i for i in range(6)],
        },
        "original_max_position_embeddings": 512,
    }

    @classmethod
    def layer_spec(cls, config: Any) -> LayerSpec:
        return LayerSpec.from_config(config, rotary_fraction=rotary_fraction(config))
