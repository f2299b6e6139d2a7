"""OLMo 2 (arXiv:2501.00656) and OLMo 3 (Ai2 2025), dense."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from specengine.layers.layer_spec import LayerSpec
from specengine.runner.loader.family import GgufFormat
from specengine.runner.loader.gguf_fields import WINDOW, layer_types, rope_by_type, window
from specengine.target.models.layer_types import typed_windows, with_rotary_kinds
from specengine.target.models.llama import LlamaForCausalLM

if TYPE_CHECKING:
    from specengine.runner.loader.gguf_file import GgufFile

# Both are of architecture "olmo2": files of OLMo 3 have a window.
_GGUF_TENSORS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def _gguf_olmo3(file: GgufFile) -> dict[str, Any]:
    return {
        "layer_types": layer_types(file, period=4),
        "rope_parameters": rope_by_type(file),
    }


class Olmo2ForCausalLM(LlamaForCausalLM):
    """Norms behind attention and feed-forward alone; q and k normalised over all heads at once."""

    gguf: ClassVar[GgufFormat | None] = GgufFormat(
        ("olmo2",), "olmo2", tensors=_GGUF_TENSORS, owns=lambda file: not window(file)
    )
    tensor_names: ClassVar[Mapping[str, str]] = {
        "post_attention_layernorm": "attention_out_norm",
        "post_feedforward_layernorm": "mlp_out_norm",
    }
    small_config: ClassVar[dict[str, Any]] = {}

    @classmethod
    def layer_spec(cls, config: Any) -> LayerSpec:
        bias = bool(config.attention_bias)
        return LayerSpec.from_config(
            config, norm_places="after", qk_norm_whole=True, qkv_bias=bias, o_bias=bias
        )


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    """OLMo 2 with windows and rotary tables by layer type."""

    gguf: ClassVar[GgufFormat | None] = GgufFormat(
        ("olmo2",),
        "olmo3",
        tensors=_GGUF_TENSORS,
        metadata={WINDOW: "sliding_window"},
        fields=_gguf_olmo3,
        owns=lambda file: bool(window(file)),
    )
    small_config: ClassVar[dict[str, Any]] = {
        "sliding_window": 48,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "factor": 8.0,
                "rope_theta": 5e5,
                "original_max_position_embeddings": 64,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
        },
    }

    @classmethod
    def sliding_windows(cls, config: Any) -> list[int | None]:
        return typed_windows(config)

    @classmethod
    def layer_specs(cls, config: Any) -> list[LayerSpec]:
        return with_rotary_kinds(super().layer_specs(config), config)
