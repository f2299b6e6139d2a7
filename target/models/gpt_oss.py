"""gpt-oss (OpenAI 2025, arXiv:2508.10925)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from specengine.layers.expert_tensors import ExpertTensors
from specengine.layers.layer_spec import ExpertsSpec, LayerSpec
from specengine.runner.loader.family import GGUF_EXPERTS, GgufFormat
from specengine.runner.loader.gguf_fields import WINDOW, layer_types, rope_parameters
from specengine.target.models.layer_types import typed_windows
from specengine.target.models.llama import LlamaForCausalLM

if TYPE_CHECKING:
    from specengine.runner.loader.gguf_file import GgufFile

_WEIGHTS = ExpertTensors(
    "mlp.experts.gate_up_proj", "mlp.experts.down_proj", swapped=True, interleaved=True
)
_BIASES = ExpertTensors(
    "mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias", interleaved=True
)
_BLOCKS, _SCALES = (
    ExpertTensors(
        f"mlp.experts.gate_up_proj_{leaf}",
        f"mlp.experts.down_proj_{leaf}",
        interleaved=True,
        leaf=leaf,
    )
    for leaf in ("blocks", "scales")
)


def _gguf_fields(file: GgufFile) -> dict[str, Any]:
    """Files do not state what all published models have: bounds of YaRN's ramp that are not whole,
    biases, and the limit of the experts' activation."""
    return {
        "layer_types": layer_types(file, period=2),
        "rope_parameters": {**rope_parameters(file), "truncate": False},
        "attention_bias": True,
        "swiglu_limit": 7.0,
    }


class GptOssForCausalLM(LlamaForCausalLM):
    """Sinks in attention, a window in the layers that the configuration marks, biases everywhere,
    and experts whose activation is clamped."""

    gguf: ClassVar[GgufFormat | None] = GgufFormat(
        ("gpt-oss",),
        "gpt_oss",
        tensors={
            **GGUF_EXPERTS,
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks.weight": "self_attn.sinks",
        },
        metadata={
            WINDOW: "sliding_window",
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "intermediate_size",
        },
        fields=_gguf_fields,
    )
    tensor_names: ClassVar[dict[str, str]] = {"router": "gate"}
    small_config: ClassVar[dict[str, Any]] = {
        "head_dim": 32,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 20,
        "swiglu_limit": 0.8,
    }

    @classmethod
    def layer_spec(cls, config: Any) -> LayerSpec:
        bias = bool(config.attention_bias)
        return LayerSpec.from_config(config, qkv_bias=bias, o_bias=bias, attention_sinks=True)

    @classmethod
    def sliding_windows(cls, config: Any) -> list[int | None]:
        return typed_windows(config)

    @classmethod
    def experts(cls, config: Any) -> list[ExpertsSpec | None]:
        spec = ExpertsSpec(
            config.num_local_experts,
            config.num_experts_per_tok,
            config.intermediate_size,
            router_bias=True,
            expert_bias=True,
            activation="clamped",
            activation_alpha=getattr(config, "swiglu_alpha", 1.702),
            activation_limit=config.swiglu_limit,
        )
        return [spec] * config.num_hidden_layers

    def own_tensors(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        found = super().own_tensors(weights)
        for one in (_BIASES, _BLOCKS, _SCALES, _WEIGHTS):
            found = one.split(found)
        return found
