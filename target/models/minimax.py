"""MiniMax-M2 (2025)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor

from specengine.layers.layer_spec import ExpertsSpec, LayerSpec
from specengine.layers.rotary import config_head_dim, rotary_fraction
from specengine.runner.loader.family import GGUF_EXPERTS, GgufFormat
from specengine.runner.loader.known_values import require
from specengine.target.models.llama import LlamaForCausalLM
from specengine.target.models.mixtral import MixtralForCausalLM


class MiniMaxM2ForCausalLM(LlamaForCausalLM):
    """Experts chosen by sigmoid with a correction; q and k normalised over all heads together, and
    part of a head rotated."""

    gguf: ClassVar[GgufFormat | None] = GgufFormat(
        ("minimax-m2",),
        "minimax_m2",
        tensors={
            **GGUF_EXPERTS,
            "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
        },
        metadata={
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "rope.dimension_count": "rotary_dim",
        },
    )
    tensor_names = MixtralForCausalLM.tensor_names
    small_config: ClassVar[dict[str, Any]] = {
        "head_dim": 32,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "rotary_dim": 16,
        "partial_rotary_factor": 0.5,
    }

    @classmethod
    def layer_spec(cls, config: Any) -> LayerSpec:
        require(config, use_qk_norm=(True,))
        return LayerSpec.from_config(
            config, qk_norm_whole=True, rotary_fraction=_rotated_part(config)
        )

    @classmethod
    def experts(cls, config: Any) -> list[ExpertsSpec | None]:
        require(config, scoring_func=("sigmoid",))
        spec = ExpertsSpec(
            config.num_local_experts,
            config.num_experts_per_tok,
            config.intermediate_size,
            scores="sigmoid",
            has_correction=True,
        )
        return [spec] * config.num_hidden_layers

    def own_tensors(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        for name, tensor in super().own_tensors(weights):
            yield name.replace(".mlp.e_score", ".mlp.gate.e_score"), tensor


def _rotated_part(config: Any) -> float:
    """The part of a head that is rotated. Published configurations state it as `rotary_dim` alone,
    of which older versions of transformers make no factor."""
    rotated = getattr(config, "rotary_dim", None)
    return rotary_fraction(config) if rotated is None else rotated / config_head_dim(config)
