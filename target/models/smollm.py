"""SmolLM3 (Hugging Face 2025)."""

from __future__ import annotations

from typing import Any, ClassVar

from specengine.layers.layer_spec import LayerSpec
from specengine.target.models.layer_types import typed_windows, with_rotation
from specengine.target.models.llama import LlamaForCausalLM


class SmolLM3ForCausalLM(LlamaForCausalLM):
    """Llama, some layers without rotary embedding (NoPE); those may have windows."""

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
