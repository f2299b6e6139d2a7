"""GPT-NeoX 20B (arXiv:2204.06745) and Pythia (arXiv:2304.01373)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from torch import Tensor

from specengine.layers.layer_spec import LayerSpec
from specengine.layers.rotary import rotary_fraction
from specengine.layers.row_order import parts_of_heads, reordered
from specengine.layers.weights import renamed
from specengine.runner.loader.family import GgufFormat
from specengine.runner.loader.gguf_fields import biases, num_layers, rope_of_part
from specengine.target.models.llama import LlamaForCausalLM

# Masks that old checkpoints carry.
_BUFFERS = (".attention.bias", ".attention.masked_bias")
_LAYERS_OF_20B = 44
_BY_HEAD = "query_key_value"  # each head's q, k and v are together


class GPTNeoXForCausalLM(LlamaForCausalLM):
    """Attention and feed-forward side by side, each behind a LayerNorm of its own; a feed-forward
    without gate, biases everywhere, part of a head rotated, as many KV heads as heads."""

    # A file states no activation. GPT-NeoX 20B alone has an approximate one.
    gguf: ClassVar[GgufFormat | None] = GgufFormat(
        ("gptneox",),
        "gpt_neox",
        epsilon="layer_norm_eps",
        tensors={"attn_qkv": "self_attn.qkv_proj"},
        metadata={"use_parallel_residual": "use_parallel_residual"},
        fields=lambda file: {
            "hidden_act": "gelu_fast" if num_layers(file) == _LAYERS_OF_20B else "gelu",
            "rope_parameters": rope_of_part(file),
            **biases(file, attention_bias="attn_qkv"),
        },
    )
    tensor_names: ClassVar[Mapping[str, str]] = {
        "gpt_neox": "model",
        "embed_in": "embed_tokens",
        "attention": "self_attn",
        "dense": "o_proj",
        "dense_h_to_4h": "up_proj",
        "dense_4h_to_h": "down_proj",
        "final_layer_norm": "norm",
        "embed_out": "lm_head",
    }
    small_config: ClassVar[dict[str, Any]] = {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.25,
        },
    }

    @classmethod
    def layer_spec(cls, config: Any) -> LayerSpec:
        bias = bool(config.attention_bias)
        return LayerSpec.from_config(
            config,
            num_kv_heads=config.num_attention_heads,
            norm="layer_bias",
            rms_norm_eps=config.layer_norm_eps,
            norm_places="parallel" if config.use_parallel_residual else "before",
            gated_mlp=False,
            rotary_fraction=rotary_fraction(config),
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=True,
        )

    def own_tensors(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        spec = self.model.spec
        order = parts_of_heads(spec.num_heads, [spec.head_dim] * 3)
        found = super().own_tensors(one for one in weights if not one[0].endswith(_BUFFERS))
        # A GGUF file has qkv_proj, whose rows are in order.
        return renamed(reordered(found, {_BY_HEAD: order}), {_BY_HEAD: "qkv_proj"})
