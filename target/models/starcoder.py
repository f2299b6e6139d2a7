"""StarCoder2 (arXiv:2402.19173)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from specengine.layers.layer_spec import LayerSpec
from specengine.runner.loader.family import GgufFormat
from specengine.runner.loader.gguf_fields import biases, window
from specengine.target.models.llama import MistralForCausalLM

if TYPE_CHECKING:
    from specengine.runner.loader.gguf_file import GgufFile


def _gguf_fields(file: GgufFile) -> dict[str, Any]:
    """Files do not state the window, which is 4,096 tokens in all published models."""
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": window(file) or 4096,
        **biases(file, use_bias="attn_q"),
    }


class Starcoder2ForCausalLM(MistralForCausalLM):
    """LayerNorm, a feed-forward without gate, biases everywhere."""

    gguf: ClassVar[GgufFormat | None] = GgufFormat(
        ("starcoder2",),
        "starcoder2",
        epsilon="norm_epsilon",
        tensors={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        fields=_gguf_fields,
    )
    tensor_names: ClassVar[Mapping[str, str]] = {"c_fc": "up_proj", "c_proj": "down_proj"}
    small_config: ClassVar[dict[str, Any]] = {"sliding_window": 48, "tie_word_embeddings": True}

    @classmethod
    def layer_spec(cls, config: Any) -> LayerSpec:
        bias = bool(config.use_bias)
        return LayerSpec.from_config(
            config,
            norm="layer_bias",
            rms_norm_eps=config.norm_epsilon,
            gated_mlp=False,
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=bias,
        )
