"""Qwen2 (2024, arXiv:2407.10671) and Qwen3 (2025, arXiv:2505.09388) with mixtures of experts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from specengine.layers.expert_tensors import ExpertTensors
from specengine.layers.layer_spec import ExpertsSpec, LayerSpec
from specengine.runner.loader.family import GGUF_EXPERTS, GgufFormat, Tensors
from specengine.target.models.qwen import Qwen2ForCausalLM, Qwen3ForCausalLM

if TYPE_CHECKING:
    from specengine.runner.loader.gguf_file import GgufFile

# The one that every row runs, behind a gate of its own.
GGUF_GATED_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{one}_shexp": f"mlp.shared_expert.{one}_proj" for one in ("gate", "up", "down")},
}
_GGUF_METADATA = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
}


def _gguf_fields(file: GgufFile) -> dict[str, Any]:
    """Of layers that all have experts, as the published ones; older files state no sizes."""
    sizes = {"moe_intermediate_size": file.shape("blk.0.ffn_up_exps.weight")[1]}
    return {"decoder_sparse_step": 1, "mlp_only_layers": [], **sizes}


def _gguf_qwen2(file: GgufFile) -> dict[str, Any]:
    shared = file.shape("blk.0.ffn_up_shexp.weight")[0]
    return {
        "norm_topk_prob": False,
        "qkv_bias": True,
        "shared_expert_intermediate_size": shared,
        **_gguf_fields(file),
    }


def gguf_shared_gates(tensors: Tensors, file: GgufFile) -> Iterator[tuple[str, Tensor]]:
    """A quantised file has the one row of a gate without its first dimension."""
    for name, tensor in tensors:
        is_gate = name.endswith("shared_expert_gate.weight")
        yield name, tensor.view(1, -1) if is_gate else tensor


def sparse_layers(config: Any) -> list[bool]:
    """Which layers have experts, as Qwen's configurations say it."""
    step, dense = config.decoder_sparse_step, config.mlp_only_layers
    return [
        layer not in dense and config.num_experts > 0 and (layer + 1) % step == 0
        for layer in range(config.num_hidden_layers)
    ]


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """Experts chosen by softmax in all layers but those that the configuration leaves out."""

    gguf: ClassVar[GgufFormat | None] = GgufFormat(
        ("qwen3moe", "qwen3vlmoe"),
        "qwen3_moe",
        tensors=GGUF_EXPERTS,
        metadata=_GGUF_METADATA,
        fields=lambda file: {"norm_topk_prob": True, **_gguf_fields(file)},
    )
    language_parts: ClassVar[tuple[str, ...]] = ("qwen3_vl_moe_text",)
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
            normalised=getattr(config, "norm_topk_prob", True),  # Qwen3-VL's always are
        )
        return [spec if sparse else None for sparse in sparse_layers(config)]

    def own_tensors(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """Qwen3-VL alone keeps experts in one tensor. It is published with a row an input, and
        transformers 5 saves it with a row an output."""
        experts = ExpertTensors(
            "mlp.experts.gate_up_proj", "mlp.experts.down_proj", inputs=self.config.hidden_size
        )
        return experts.split(super().own_tensors(weights))


class Qwen2MoeForCausalLM(Qwen2ForCausalLM):
    """Beside the chosen experts one that every row runs, behind a gate of its own."""

    gguf: ClassVar[GgufFormat | None] = GgufFormat(
        ("qwen2moe",),
        "qwen2_moe",
        tensors={**GGUF_EXPERTS, **GGUF_GATED_SHARED_EXPERT},
        metadata=_GGUF_METADATA,
        fields=_gguf_qwen2,
        change=gguf_shared_gates,
    )
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
