"""SmolLM3 (Hugging Face 2025)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from specengine.layers.layer_spec import LayerSpec
from specengine.runner.loader.family import GgufFormat
from specengine.runner.loader.gguf_fields import biases, num_layers
from specengine.target.models.layer_types import typed_windows, with_rotation
from specengine.target.models.llama import LlamaForCausalLM

if TYPE_CHECKING:
    from specengine.runner.loader.gguf_file import GgufFile


def _gguf_fields(file: GgufFile) -> dict[str, Any]:
    """Files do not state which layers rotate: all but every fourth, as in the published models."""
    return {
        "no_rope_layers": [int((layer + 1) % 4 != 0) for layer in range(num_layers(file))],
        "use_sliding_window": False,
        **biases(file, attention_bias="attn_q", mlp_bias="ffn_gate"),
    }


class SmolLM3ForCausalLM(LlamaForCausalLM):
    """Llama, some layers without rotary embedding (NoPE); those may have windows."""

    gguf: ClassVar[GgufFormat | None] = GgufFormat(
        ("smollm3",), "smollm3", has_rotary_pairs=True, fields=_gguf_fields
    )
    small_config: ClassVar[dict[str, Any]] = {
        "no_rope_layers": [1, 0, 1],
        "use_sliding_window": True,
        "sliding_window": 48,
    }

    @classmethod
    def sliding_windows(cls, config: Any) -> list[int | None]:
        windows = typed_windows(config)
        return windows if config.use_sliding_window else [None] * len(windows)

    @classmethod
    def layer_specs(cls, config: Any) -> list[LayerSpec]:
        rotates = config.no_rope_layers[: config.num_hidden_layers]  # 1 where a layer rotates
        return with_rotation(super().layer_specs(config), rotates)
