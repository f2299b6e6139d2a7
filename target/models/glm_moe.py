"""GLM-4.5 and GLM-4.6 (Zeng et al. 2025, arXiv:2508.06471)."""

from __future__ import annotations

from typing import Any, ClassVar

from specengine.layers.layer_spec import ExpertsSpec, LayerSpec
from specengine.layers.rotary import rotary_fraction
from specengine.runner.loader.family import GgufFormat
from specengine.target.models.llama import LlamaForCausalLM


class Glm4MoeForCausalLM(LlamaForCausalLM):
    """Dense first layers, then experts chosen within groups, with a correction, and shared ones;
    part of a head is rotated."""

    gguf: ClassVar[GgufFormat | None] = None
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
