"""gpt-oss (OpenAI 2025, arXiv:2508.10925)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from specengine.kernels.linear import mxfp4
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


class GptOssForCausalLM(LlamaForCausalLM):
    """Sinks in attention, a window in the layers that the configuration marks, biases everywhere,
    and experts whose activation is clamped. Experts in MXFP4 are unpacked to the model's dtype."""

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
        whole = without_mxfp4(super().own_tensors(weights), self.embed.weight.dtype)
        return _WEIGHTS.split(_BIASES.split(whole))


def without_mxfp4(
    weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Pairs NAME_blocks and NAME_scales as NAME, [E, in, out] of a dtype. One whose other half
    never comes is passed on as it is."""
    waiting: dict[str, tuple[str, Tensor]] = {}
    for name, tensor in weights:
        stem, _, kind = name.rpartition("_")
        if kind not in ("blocks", "scales"):
            yield name, tensor
        elif stem not in waiting:
            waiting[stem] = (name, tensor)
        else:
            found = {kind: tensor, waiting[stem][0].rpartition("_")[2]: waiting.pop(stem)[1]}
            yield stem, mxfp4.dequantise(found["blocks"], found["scales"], dtype).transpose(1, 2)
    yield from waiting.values()
