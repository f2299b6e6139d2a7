"""Gemma 2 (arXiv:2408.00118) and the text part of Gemma 3 (arXiv:2503.19786)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from specengine.layers.layer_spec import LayerSpec, Multipliers
from specengine.runner.loader.family import GgufFormat
from specengine.runner.loader.gguf_fields import (
    WINDOW,
    head_dim,
    layer_types,
    num_layers,
    rope_by_type,
)
from specengine.target.models.layer_types import typed_windows, with_rotary_kinds
from specengine.target.models.llama import LlamaForCausalLM

if TYPE_CHECKING:
    from specengine.runner.loader.gguf_file import GgufFile

_GGUF_TENSORS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def _gguf_scalar(file: GgufFile, layers_of_27b: int) -> int:
    """query_pre_attn_scalar, which files do not state: of the 27B models alone not the head."""
    if num_layers(file) != layers_of_27b:
        return head_dim(file)
    hidden: int = file.require("{arch}.embedding_length")
    return hidden // int(file.require("{arch}.attention.head_count"))


def _gguf_gemma2(file: GgufFile) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": _gguf_scalar(file, layers_of_27b=46),
        "layer_types": layer_types(file, period=2),
        "sliding_window": file.get(f"{{arch}}.{WINDOW}", 4096),
        "attn_logit_softcapping": file.get("{arch}.attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.get("{arch}.final_logit_softcapping", 30.0),
    }


def _gguf_gemma3(file: GgufFile) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": _gguf_scalar(file, layers_of_27b=62),
        "layer_types": layer_types(file, period=6),
        "rope_parameters": rope_by_type(file, theta_of_windows=10000.0),
    }


class Gemma2ForCausalLM(LlamaForCausalLM):
    """Norms around attention and feed-forward, gains stored less 1, scores and logits capped,
    windows in the layers that the configuration marks."""

    gguf: ClassVar[GgufFormat | None] = GgufFormat(
        ("gemma2",),
        "gemma2",
        norm_offset=1.0,
        tensors=_GGUF_TENSORS,
        fields=_gguf_gemma2,
    )
    tensor_names: ClassVar[Mapping[str, str]] = {
        "post_attention_layernorm": "attention_out_norm",
        "pre_feedforward_layernorm": "post_attention_layernorm",
        "post_feedforward_layernorm": "mlp_out_norm",
    }
    small_config: ClassVar[dict[str, Any]] = {
        "head_dim": 32,
        "query_pre_attn_scalar": 20,
        "sliding_window": 48,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
    }

    @classmethod
    def layer_spec(cls, config: Any) -> LayerSpec:
        bias = bool(config.attention_bias)
        return LayerSpec.from_config(
            config,
            norm_places="around",
            norm_offset=1.0,
            qkv_bias=bias,
            o_bias=bias,
            attention_softcap=config.attn_logit_softcapping,
        )

    @classmethod
    def sliding_windows(cls, config: Any) -> list[int | None]:
        return typed_windows(config)

    @classmethod
    def multipliers(cls, config: Any) -> Multipliers:
        """The embedding's is rounded to the dtype in which the model is built, as it was in
        training."""
        dtype = torch.get_default_dtype()
        embedding = torch.tensor(config.hidden_size**0.5, dtype=dtype, device="cpu")
        attention = config.query_pre_attn_scalar**-0.5
        return Multipliers(embedding=float(embedding), attention=attention)

    @classmethod
    def logits_softcap(cls, config: Any) -> float | None:
        found: float | None = config.final_logit_softcapping
        return found


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """Gemma 2 with heads of q and k normalised and rotary tables by layer type; caps only where the
    configuration has them."""

    gguf: ClassVar[GgufFormat | None] = GgufFormat(
        ("gemma3",),
        "gemma3_text",
        norm_offset=1.0,
        tensors=_GGUF_TENSORS,
        metadata={WINDOW: "sliding_window"},
        optional={"final_logit_softcapping": "final_logit_softcapping"},
        fields=_gguf_gemma3,
    )
    small_config: ClassVar[dict[str, Any]] = {
        "head_dim": 32,
        "query_pre_attn_scalar": 20,
        "sliding_window": 48,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "tie_word_embeddings": True,
    }

    @classmethod
    def layer_specs(cls, config: Any) -> list[LayerSpec]:
        return with_rotary_kinds(super().layer_specs(config), config)

    @classmethod
    def layer_spec(cls, config: Any) -> LayerSpec:
        return replace(super().layer_spec(config), qk_norm=True)
