"""Llama 4 (Meta 2025), its text part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from specengine.layers.expert_tensors import ExpertTensors
from specengine.layers.layer_spec import ExpertsSpec, LayerSpec
from specengine.layers.query_temperature import QueryTemperature
from specengine.runner.loader.family import GGUF_EXPERTS, GgufFormat
from specengine.runner.loader.gguf_fields import WINDOW, num_layers
from specengine.target.models.layer_types import layer_types
from specengine.target.models.llama import LlamaForCausalLM

if TYPE_CHECKING:
    from specengine.runner.loader.gguf_file import GgufFile

_EXPERTS = ExpertTensors("mlp.experts.gate_up_proj", "mlp.experts.down_proj", swapped=True)
_EXPERTS_OF_MAVERICK = 128
_KINDS = ("full_attention", "chunked_attention")


def _gguf_fields(file: GgufFile) -> dict[str, Any]:
    """The file states which layers have experts. A window of 0 means that all layers rotate and see
    all of the text. The other numbers are those of the published models: every fourth layer does
    not rotate, and Maverick's heads are not normalised."""
    count, step = num_layers(file), file.require("{arch}.interleave_moe_layer_step")
    is_plain = file.get(f"{{arch}}.{WINDOW}") == 0
    rotates = [is_plain or (layer + 1) % 4 != 0 for layer in range(count)]
    return {
        "intermediate_size_mlp": file.require("{arch}.feed_forward_length"),
        "intermediate_size": file.require("{arch}.expert_feed_forward_length"),
        "moe_layers": [layer for layer in range(count) if step and (layer + 1) % step == 0],
        "no_rope_layers": [int(one) for one in rotates],
        "layer_types": [
            "chunked_attention" if one and not is_plain else "full_attention" for one in rotates
        ],
        "attention_chunk_size": 8192,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "attn_temperature_tuning": True,
        "use_qk_norm": file.require("{arch}.expert_count") != _EXPERTS_OF_MAVERICK,
    }


class Llama4ForCausalLM(LlamaForCausalLM):
    """Layers that rotate, with heads of q and k normalised without gains, attend within chunks of
    the text; those between do neither, see all of it, and scale queries by their position. Experts,
    in some layers, read rows times a sigmoid of the router's logit, beside a shared one.
    """

    gguf: ClassVar[GgufFormat | None] = GgufFormat(
        ("llama4",),
        "llama4_text",
        tensors={
            **GGUF_EXPERTS,
            **{
                f"ffn_{one}_shexp": f"mlp.shared_expert.{one}_proj"
                for one in ("gate", "up", "down")
            },
        },
        metadata={
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
        },
        fields=_gguf_fields,
    )
    has_rotary_pairs: ClassVar[bool] = True
    tensor_names: ClassVar[Mapping[str, str]] = {"feed_forward": "mlp", "router": "gate"}
    small_config: ClassVar[dict[str, Any]] = {
        "head_dim": 32,
        "intermediate_size": 48,
        "intermediate_size_mlp": 112,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_layers": [0, 2],
        "no_rope_layers": [1, 0, 1],
        "attention_chunk_size": 24,
        "floor_scale": 16,
        "attn_scale": 0.4,
    }

    @classmethod
    def layer_spec(cls, config: Any) -> LayerSpec:
        bias = bool(config.attention_bias)
        spec = LayerSpec.from_config(config, qkv_bias=bias, o_bias=bias)
        return replace(spec, intermediate_size=config.intermediate_size_mlp)

    @classmethod
    def layer_specs(cls, config: Any) -> list[LayerSpec]:
        rotating, kinds = config.no_rope_layers, layer_types(config, _KINDS)
        layers = zip(super().layer_specs(config), rotating, kinds, strict=True)
        temperature = QueryTemperature(config.floor_scale, config.attn_scale)
        return [
            replace(
                spec,
                has_rotary=bool(rotates),
                attention_chunk=(
                    config.attention_chunk_size if kind == "chunked_attention" else None
                ),
                qk_norm=bool(rotates and config.use_qk_norm),
                query_temperature=(
                    None if rotates or not config.attn_temperature_tuning else temperature
                ),
            )
            for spec, rotates, kind in layers
        ]

    @classmethod
    def experts(cls, config: Any) -> list[ExpertsSpec | None]:
        spec = ExpertsSpec(
            config.num_local_experts,
            config.num_experts_per_tok,
            config.intermediate_size,
            scores="sigmoid",
            normalised=False,
            weighs_input=True,
            shared_size=config.intermediate_size,
        )
        return [
            spec if layer in config.moe_layers else None
            for layer in range(config.num_hidden_layers)
        ]

    def own_tensors(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        return self._with_gains(_EXPERTS.split(super().own_tensors(weights)))

    def _with_gains(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """With ones for the norms of q and k, which have no gains."""
        yield from weights
        for name, parameter in self.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                yield name, parameter.new_ones(parameter.shape)
