"""Mixtral (Jiang et al. 2024, arXiv:2401.04088)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from specengine.layers.layer_spec import ExpertsSpec
from specengine.runner.loader.family import GGUF_EXPERTS, GgufFormat
from specengine.runner.loader.gguf_fields import WINDOW
from specengine.target.models.llama import MistralForCausalLM


class MixtralForCausalLM(MistralForCausalLM):
    """Mistral with experts in every layer."""

    tensor_names: ClassVar[Mapping[str, str]] = {
        "block_sparse_moe": "mlp",
        "w1": "gate_proj",
        "w3": "up_proj",
        "w2": "down_proj",
    }
    gguf: ClassVar[GgufFormat | None] = GgufFormat(
        ("llama",),
        "mixtral",
        has_rotary_pairs=True,
        tensors=GGUF_EXPERTS,
        metadata={"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
        optional={WINDOW: "sliding_window"},
    )
    small_config: ClassVar[dict[str, Any]] = {
        "head_dim": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }

    @classmethod
    def experts(cls, config: Any) -> list[ExpertsSpec | None]:
        chosen, size = config.num_experts_per_tok, config.intermediate_size
        return [ExpertsSpec(config.num_local_experts, chosen, size)] * config.num_hidden_layers
