"""OLMoE (arXiv:2409.02060)."""

from __future__ import annotations

from typing import Any, ClassVar

from specengine.core.errors import ModelLoadError
from specengine.layers.layer_spec import ExpertsSpec, LayerSpec
from specengine.runner.loader.family import GGUF_EXPERTS, GgufFormat
from specengine.runner.loader.gguf_fields import biases
from specengine.target.models.llama import LlamaForCausalLM


class OlmoeForCausalLM(LlamaForCausalLM):
    """Experts in every layer; q and k normalised over all heads at once."""

    gguf: ClassVar[GgufFormat | None] = GgufFormat(
        ("olmoe",),
        "olmoe",
        tensors=GGUF_EXPERTS,
        metadata={"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"},
        fields=lambda file: {"norm_topk_prob": False, **biases(file, attention_bias="attn_q")},
    )
    small_config: ClassVar[dict[str, Any]] = {
        "intermediate_size": 48,
        "num_experts": 8,
        "num_experts_per_tok": 3,
    }

    @classmethod
    def layer_spec(cls, config: Any) -> LayerSpec:
        if config.clip_qkv is not None:
            raise ModelLoadError(f"clip_qkv {config.clip_qkv} of config.json is not supported")
        bias = bool(config.attention_bias)
        return LayerSpec.from_config(config, qk_norm_whole=True, qkv_bias=bias, o_bias=bias)

    @classmethod
    def experts(cls, config: Any) -> list[ExpertsSpec | None]:
        spec = ExpertsSpec(
            config.num_experts,
            config.num_experts_per_tok,
            config.intermediate_size,
            normalised=bool(config.norm_topk_prob),
        )
        return [spec] * config.num_hidden_layers
