"""dots.llm1 (rednote 2025, arXiv:2506.05767)."""

from __future__ import annotations

from typing import Any, ClassVar

from specengine.layers.layer_spec import ExpertsSpec
from specengine.runner.loader.family import GGUF_EXPERTS, GGUF_SHARED_EXPERTS, GgufFormat
from specengine.runner.loader.gguf_fields import biases
from specengine.target.models.deepseek import require
from specengine.target.models.qwen import Qwen3ForCausalLM


class Dots1ForCausalLM(Qwen3ForCausalLM):
    """Attention of Qwen3; dense first layers, then experts chosen by sigmoid, perhaps within
    groups, with a correction, beside shared ones."""

    gguf: ClassVar[GgufFormat | None] = GgufFormat(
        ("dots1",),
        "dots1",
        tensors={
            **GGUF_EXPERTS,
            **GGUF_SHARED_EXPERTS,
            "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
        },
        metadata={
            "expert_count": "n_routed_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_count": "n_shared_experts",
            "leading_dense_block_count": "first_k_dense_replace",
            "expert_weights_scale": "routed_scaling_factor",
            "expert_weights_norm": "norm_topk_prob",
        },
        fields=lambda file: {
            "n_group": file.get("{arch}.expert_group_count", 1),
            "topk_group": file.get("{arch}.expert_group_used_count", 1),
            "sliding_window": None,  # files tell none
            **biases(file, attention_bias="attn_q"),
        },
    )
    tensor_names: ClassVar[dict[str, str]] = {"shared_experts": "shared_expert"}
    small_config: ClassVar[dict[str, Any]] = {
        "head_dim": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "sliding_window": 48,
        "max_window_layers": 2,
    }

    @classmethod
    def experts(cls, config: Any) -> list[ExpertsSpec | None]:
        """Published configurations call the choice by sigmoid, too, after the correction."""
        require(config, scoring_func=("noaux_tc", "sigmoid"), topk_method=("noaux_tc",))
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
