"""ERNIE 4.5 with mixtures of experts (Baidu 2025), the text model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from specengine.core.errors import ModelLoadError
from specengine.layers.layer_spec import ExpertsSpec, LayerSpec
from specengine.runner.loader.family import GGUF_EXPERTS, GGUF_SHARED_EXPERTS, GgufFormat
from specengine.target.models.llama import LlamaForCausalLM


class Ernie4_5_MoeForCausalLM(LlamaForCausalLM):
    """Experts chosen by softmax with a correction, and shared ones; rotary pairs side by side."""

    gguf: ClassVar[GgufFormat | None] = GgufFormat(
        ("ernie4_5-moe",),
        "ernie4_5_moe",
        tensors={
            **GGUF_EXPERTS,
            **GGUF_SHARED_EXPERTS,
            "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
        },
        metadata={
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_k",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_count": "moe_num_shared_experts",
            "interleave_moe_layer_step": "moe_layer_interval",
            "leading_dense_block_count": "moe_layer_start_index",
        },
        fields=lambda file: {"moe_layer_end_index": -1, "use_bias": False},
    )
    mtp_form = "ERNIE 4.5"
    has_rotary_pairs = True
    tensor_names: ClassVar[dict[str, str]] = {
        "shared_experts": "shared_expert",
        "moe_statics": "gate",
    }
    small_config: ClassVar[dict[str, Any]] = {
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_intermediate_size": 40,
        "moe_num_shared_experts": 2,
        "tie_word_embeddings": True,
    }

    @classmethod
    def layer_spec(cls, config: Any) -> LayerSpec:
        if config.use_bias:
            raise ModelLoadError("use_bias of config.json is true, which is not supported")
        return LayerSpec.from_config(config)

    @classmethod
    def experts(cls, config: Any) -> list[ExpertsSpec | None]:
        spec = ExpertsSpec(
            config.moe_num_experts,
            config.moe_k,
            config.moe_intermediate_size,
            has_correction=True,
            shared_size=config.moe_num_shared_experts * config.moe_intermediate_size,
        )
        first, last = config.moe_layer_start_index, config.moe_layer_end_index
        return [
            spec
            if first <= layer <= last and (layer + 1) % config.moe_layer_interval == 0
            else None
            for layer in range(config.num_hidden_layers)
        ]

    @classmethod
    def mtp_spec(cls, config: Any) -> LayerSpec:
        """The layer that predicts one token further (`model.mtp_block`) has no experts."""
        return replace(super().mtp_spec(config), experts=None)

    def own_tensors(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        for name, tensor in super().own_tensors(weights):
            is_correction = name.endswith("e_score_correction_bias")
            yield name, tensor.view(-1) if is_correction else tensor
