"""Granite 3 with mixtures of experts (IBM 2024)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor

from specengine.layers.expert_tensors import ExpertTensors
from specengine.layers.layer_spec import ExpertsSpec, LayerSpec
from specengine.runner.loader.family import GGUF_EXPERTS, GgufFormat
from specengine.runner.loader.gguf_fields import biases
from specengine.target.models.granite import GGUF_SCALES, GraniteForCausalLM


class GraniteMoeForCausalLM(GraniteForCausalLM):
    """Granite with experts, of which checkpoints hold those of a layer in one tensor a product."""

    gguf: ClassVar[GgufFormat | None] = GgufFormat(
        ("granitemoe",),
        "granitemoe",
        has_rotary_pairs=True,
        tensors=GGUF_EXPERTS,
        metadata={
            **GGUF_SCALES,
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
        },
        fields=lambda file: biases(file, attention_bias="attn_q"),
    )
    tensor_names: ClassVar[dict[str, str]] = {"block_sparse_moe": "mlp"}
    small_config: ClassVar[dict[str, Any]] = {
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.3,
        "logits_scaling": 2.0,
    }

    @classmethod
    def layer_spec(cls, config: Any) -> LayerSpec:
        bias = bool(config.attention_bias)
        return LayerSpec.from_config(config, qkv_bias=bias, o_bias=bias)

    @classmethod
    def experts(cls, config: Any) -> list[ExpertsSpec | None]:
        chosen, size = config.num_experts_per_tok, config.intermediate_size
        return [ExpertsSpec(config.num_local_experts, chosen, size)] * config.num_hidden_layers

    def own_tensors(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        packed = ExpertTensors("mlp.input_linear.weight", "mlp.output_linear.weight")
        for name, tensor in packed.split(super().own_tensors(weights)):
            yield name.replace(".router.layer.", ".gate."), tensor
