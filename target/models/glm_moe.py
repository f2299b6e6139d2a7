"""GLM-4.5 and GLM-4.6 (Zeng et al. 2025, arXiv:2508.06471)."""

from __future__ import annotations

from typing import Any, ClassVar

from specengine.layers.layer_spec import ExpertsSpec, LayerSpec
from specengine.layers.rotary import rotary_fraction
from specengine.runner.loader.family import (
    GGUF_EXPERTS,
    GGUF_ROUTING,
    GGUF_SHARED_EXPERTS,
    GgufFormat,
)
from specengine.runner.loader.gguf_fields import biases
from specengine.target.models.llama import LlamaForCausalLM


def grouped_experts(config: Any) -> list[ExpertsSpec | None]:
    """Dense first layers, then experts chosen by sigmoid within groups, with a correction, beside
    shared ones."""
    spec = ExpertsSpec(
        config.n_routed_experts,
        config.num_experts_per_tok,
        config.moe_intermediate_size,
        scores="sigmoid",
        normalised=config.norm_topk_prob,
        scaling=config.routed_scaling_factor,
        has_correction=True,
        num_groups=config.n_group,
        num_chosen_groups=config.topk_group,
        shared_size=config.n_shared_experts * config.moe_intermediate_size,
    )
    layers, dense = config.num_hidden_layers, config.first_k_dense_replace
    return [None if layer < dense else spec for layer in range(layers)]


class Glm4MoeForCausalLM(LlamaForCausalLM):
    """Dense first layers, then experts chosen within groups, with a correction, and shared ones;
    part of a head is rotated."""

    gguf: ClassVar[GgufFormat | None] = GgufFormat(
        ("glm4moe",),
        "glm4_moe",
        tensors={
            **GGUF_EXPERTS,
            **GGUF_SHARED_EXPERTS,
            "post_attention_norm": "post_attention_layernorm",
            "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
        },
        metadata={
            **GGUF_ROUTING,
            "expert_weights_scale": "routed_scaling_factor",
            "expert_weights_norm": "norm_topk_prob",
        },
        fields=lambda file: {
            "n_group": file.get("{arch}.expert_group_count", 1),
            "topk_group": file.get("{arch}.expert_group_used_count", 1),
            "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensor_names,
            **biases(file, attention_bias="attn_q"),
        },
    )
    tensor_names: ClassVar[dict[str, str]] = {"shared_experts": "shared_expert"}
    small_config: ClassVar[dict[str, Any]] = {
        "head_dim": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.8,
        "first_k_dense_replace": 1,
        "attention_bias": True,
        "use_qk_norm": True,
    }

    @classmethod
    def layer_spec(cls, config: Any) -> LayerSpec:
        return LayerSpec.from_config(
            config,
            qkv_bias=bool(config.attention_bias),
            qk_norm=bool(config.use_qk_norm),
            rotary_fraction=rotary_fraction(config),
        )

    @classmethod
    def experts(cls, config: Any) -> list[ExpertsSpec | None]:
        return grouped_experts(config)
