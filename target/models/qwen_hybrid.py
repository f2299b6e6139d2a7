"""Qwen3-Next (2025) and Qwen3.5 (2026): gated delta layers, and gated attention in every fourth."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from specengine.core.errors import ModelLoadError
from specengine.layers.expert_tensors import ExpertTensors
from specengine.layers.layer_spec import ExpertsSpec, GatedDeltaSpec, LayerSpec
from specengine.layers.rotary import rotary_fraction
from specengine.layers.row_order import parts_of_heads, reordered
from specengine.runner.loader.family import GgufFormat
from specengine.runner.loader.known_values import require
from specengine.target.models.layer_types import layer_types
from specengine.target.models.llama import LlamaForCausalLM
from specengine.target.models.qwen_hybrid_gguf import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from specengine.target.models.qwen_moe import sparse_layers

_SMALL_STATE: dict[str, Any] = {
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
_SMALL_EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 72,
}
_KINDS = ("linear_attention", "full_attention")
_EXPERTS = ExpertTensors("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


class Qwen3_5ForCausalLM(LlamaForCausalLM):
    """Norms whose gain counts from 1, gated attention over a part of each head, and gated delta
    layers where the configuration says so."""

    gguf: ClassVar[GgufFormat | None] = QWEN3_5
    language_parts: ClassVar[tuple[str, ...]] = ("qwen3_5_text",)
    small_config: ClassVar[dict[str, Any]] = _SMALL_STATE
    mtp_form = "Qwen3-Next"

    @classmethod
    def layer_spec(cls, config: Any) -> LayerSpec:
        require(config, attn_output_gate=(True,))
        return LayerSpec.from_config(
            config,
            qk_norm=True,
            qkv_bias=bool(config.attention_bias),
            o_bias=bool(config.attention_bias),
            norm_offset=1.0,
            rotary_fraction=rotary_fraction(config),
            attention_gate=True,
            # Of layers with experts alone no configuration states another.
            intermediate_size=getattr(config, "intermediate_size", 0),
        )

    @classmethod
    def layer_specs(cls, config: Any) -> list[LayerSpec]:
        specs = zip(super().layer_specs(config), layer_types(config, _KINDS), strict=True)
        delta = _delta_spec(config)
        return [spec if kind == "full_attention" else _linear(spec, delta) for spec, kind in specs]

    @classmethod
    def mtp_spec(cls, config: Any) -> LayerSpec:
        """They attend, whatever the last layer does."""
        return super().layer_specs(config)[-1]


def _delta_spec(config: Any) -> GatedDeltaSpec:
    return GatedDeltaSpec(
        num_key_heads=config.linear_num_key_heads,
        num_heads=config.linear_num_value_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        conv_width=config.linear_conv_kernel_dim,
    )


def _linear(spec: LayerSpec, delta: GatedDeltaSpec) -> LayerSpec:
    """But for the rotation, whose table the stack shares, what it lacks of attention is at its
    default. Raises ModelLoadError for an activation that the rule does not have."""
    if spec.activation != "silu":
        raise ModelLoadError(
            f"activation {spec.activation!r} is not supported in gated delta layers; known: 'silu'"
        )
    return replace(
        spec, gated_delta=delta, attention_gate=False, qk_norm=False, qkv_bias=False, o_bias=False
    )


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):
    """The same with experts in every layer, and a shared one behind a gate."""

    gguf: ClassVar[GgufFormat | None] = QWEN3_5_MOE
    language_parts: ClassVar[tuple[str, ...]] = ("qwen3_5_moe_text",)
    small_config: ClassVar[dict[str, Any]] = _SMALL_STATE | _SMALL_EXPERTS

    @classmethod
    def experts(cls, config: Any) -> list[ExpertsSpec | None]:
        return [_experts_spec(config)] * config.num_hidden_layers

    def own_tensors(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        return _EXPERTS.split(super().own_tensors(weights))


def _experts_spec(config: Any) -> ExpertsSpec:
    return ExpertsSpec(
        config.num_experts,
        config.num_experts_per_tok,
        config.moe_intermediate_size,
        normalised=getattr(config, "norm_topk_prob", True),
        shared_size=config.shared_expert_intermediate_size,
        shared_gate=True,
    )


class Qwen3NextForCausalLM(Qwen3_5MoeForCausalLM):
    """The same with projections of a gated delta layer that are grouped by key head."""

    gguf: ClassVar[GgufFormat | None] = QWEN3_NEXT
    language_parts: ClassVar[tuple[str, ...]] = ()
    small_config: ClassVar[dict[str, Any]] = {
        **_SMALL_STATE,
        **_SMALL_EXPERTS,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    }

    @classmethod
    def experts(cls, config: Any) -> list[ExpertsSpec | None]:
        spec = _experts_spec(config)
        return [spec if sparse else None for sparse in sparse_layers(config)]

    def own_tensors(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """Projections are grouped by key head: q, k, v and z, and b and a."""
        delta = _delta_spec(self.config)
        group = delta.num_heads // delta.num_key_heads
        keys, values = delta.key_dim, group * delta.value_dim
        orders = {
            "in_proj_qkvz": parts_of_heads(delta.num_key_heads, [keys, keys, values, values]),
            "in_proj_ba": parts_of_heads(delta.num_key_heads, [group, group]),
        }
        return reordered(super().own_tensors(weights), orders)
