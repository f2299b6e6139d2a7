"""dots.llm1 (rednote 2025, arXiv:2506.05767)."""

from __future__ import annotations

from typing import Any, ClassVar

from specengine.layers.layer_spec import ExpertsSpec
from specengine.runner.loader.family import (
    GGUF_EXPERTS,
    GGUF_ROUTING,
    GGUF_SHARED_EXPERTS,
    GgufFormat,
)
from specengine.runner.loader.gguf_fields import biases
from specengine.runner.loader.known_values import require
from specengine.target.models.glm_moe import grouped_experts
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
            **GGUF_ROUTING,
            "expert_weights_scale": "routed_scaling_factor",
            "expert_weights_norm": "norm_topk_prob",
        },
        fields=lambda file: {
            "n_group": file.get("{arch}.expert_group_count", 1),
            "topk_group": file.get("{arch}.expert_group_used_count", 1),
            "sliding_window": None,  # files state none
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
        """Published configurations have the correction's name as `scoring_func`, too."""
        require(config, scoring_func=("noaux_tc", "sigmoid"), topk_method=("noaux_tc",))
        return grouped_experts(config)
