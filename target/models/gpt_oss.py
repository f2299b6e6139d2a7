"""gpt-oss (OpenAI 2025, arXiv:2508.10925)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor

from specengine.layers.expert_tensors import ExpertTensors
from specengine.layers.layer_spec import ExpertsSpec, LayerSpec
from specengine.runner.loader.family import GgufFormat
from specengine.target.models.llama import LlamaForCausalLM

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


class GptOssForCausalLM(LlamaForCausalLM):
    """Sinks in attention, a window in the layers that the configuration marks, biases everywhere,
    and experts whose activation is clamped."""

    gguf: ClassVar[GgufFormat | None] = None
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
        window = config.sliding_window
        return [window if kind == "sliding_attention" else None for kind in config.layer_types]

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
