"""Qwen2 (2024, arXiv:2407.10671) and Qwen3 (2025, arXiv:2505.09388) with mixtures of experts."""

from __future__ import annotations

from typing import Any, ClassVar

from specengine.layers.layer_spec import ExpertsSpec, LayerSpec
from specengine.runner.loader.family import GgufFormat
from specengine.target.models.qwen import Qwen2ForCausalLM, Qwen3ForCausalLM


def sparse_layers(config: Any) -> list[bool]:
    """Which layers have experts, as Qwen's configurations say it."""
    step, dense = config.decoder_sparse_step, config.mlp_only_layers
    return [
        layer not in dense and config.num_experts > 0 and (layer + 1) % step == 0
        for layer in range(config.num_hidden_layers)
    ]


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """Experts chosen by softmax in all layers but those that the configuration leaves out."""

    gguf: ClassVar[GgufFormat | None] = None
    small_config: ClassVar[dict[str, Any]] = {
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    }

    @classmethod
    def sliding_windows(cls, config: Any) -> list[int | None]:
        return [config.sliding_window] * config.num_hidden_layers

    @classmethod
    def experts(cls, config: Any) -> list[ExpertsSpec | None]:
        spec = ExpertsSpec(
            config.num_experts,
            config.num_experts_per_tok,
            config.moe_intermediate_size,
            normalised=config.norm_topk_prob,
        )
        return [spec if sparse else None for sparse in sparse_layers(config)]


class Qwen2MoeForCausalLM(Qwen2ForCausalLM):
    """Beside the chosen experts one that every row runs, behind a gate of its own."""

    gguf: ClassVar[GgufFormat | None] = None
    small_config: ClassVar[dict[str, Any]] = {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 72,
        "decoder_sparse_step": 2,
    }

    @classmethod
    def layer_spec(cls, config: Any) -> LayerSpec:
        return LayerSpec.from_config(config, qkv_bias=config.qkv_bias)

    @classmethod
    def experts(cls, config: Any) -> list[ExpertsSpec | None]:
        spec = ExpertsSpec(
            config.num_experts,
            config.num_experts_per_tok,
            config.moe_intermediate_size,
            normalised=config.norm_topk_prob,
            shared_size=config.shared_expert_intermediate_size,
            shared_gate=True,
        )
        return [spec if sparse else None for sparse in sparse_layers(config)]
