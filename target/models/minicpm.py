"""MiniCPM (OpenBMB 2024, arXiv:2404.06395), MiniCPM4 (2025) and MiniCPM3, with latent attention."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

from specengine.core.errors import ModelLoadError
from specengine.layers.layer_spec import LayerSpec, Multipliers
from specengine.runner.loader.family import GgufFormat
from specengine.runner.loader.gguf_fields import num_layers, shortest
from specengine.target.models.deepseek import latent_layer
from specengine.target.models.llama import LlamaForCausalLM

if TYPE_CHECKING:
    from specengine.runner.loader.gguf_file import GgufFile


def _gguf_scales(file: GgufFile) -> dict[str, Any]:
    """The file has the multipliers, config.json what they are made of."""
    residual = file.require("{arch}.residual_scale")
    hidden = file.require("{arch}.embedding_length")
    return {
        "scale_depth": shortest(residual * math.sqrt(num_layers(file))),
        "dim_model_base": shortest(hidden / file.require("{arch}.logit_scale")),
    }


class MiniCPMForCausalLM(LlamaForCausalLM):
    """Llama with embedding, residual stream and logits scaled. Its sparse attention (InfLLM) is not
    computed: a configuration that asks for it is served up to the length below which it is dense.
    """

    gguf: ClassVar[GgufFormat | None] = GgufFormat(
        ("minicpm",),
        "minicpm",
        has_rotary_pairs=True,
        metadata={"embedding_scale": "scale_emb"},
        fields=_gguf_scales,
    )
    extends_config = "granite"
    config_defaults: ClassVar[dict[str, Any]] = {
        "tie_word_embeddings": True,
        "scale_emb": 1,
        "scale_depth": 1,
        "dim_model_base": 1,
    }
    small_config: ClassVar[dict[str, Any]] = {
        "scale_emb": 4.0,
        "scale_depth": 1.4,
        "dim_model_base": 16,
        "tie_word_embeddings": False,  # else its texts repeat one token
    }

    @classmethod
    def layer_spec(cls, config: Any) -> LayerSpec:
        if getattr(config, "num_experts", 0):
            raise ModelLoadError(f"num_experts {config.num_experts} is not supported by MiniCPM")
        require_dense(config)
        return super().layer_spec(config)

    @classmethod
    def multipliers(cls, config: Any) -> Multipliers:
        return Multipliers(
            embedding=config.scale_emb,
            residual=config.scale_depth / math.sqrt(config.num_hidden_layers),
            logits=config.dim_model_base / config.hidden_size,
        )


def require_dense(config: Any) -> None:
    """Raises ModelLoadError where requests may reach the length at which `sparse_config` asks for
    sparse attention. The last token of a context is not run, so that a context of `dense_len` is
    dense."""
    sparse = getattr(config, "sparse_config", None)
    if not sparse:
        return
    context = getattr(config, "served_context", None) or config.max_position_embeddings
    dense = sparse.get("dense_len", 8192)
    if context > dense:
        raise ModelLoadError(
            f"sparse_config of config.json asks for sparse attention (InfLLM) from {dense} tokens "
            f"on, which is not supported, and the context is {context}; serve --context-length "
            f"{dense} at most, or take sparse_config out for full attention of all texts"
        )


class MiniCPM3ForCausalLM(MiniCPMForCausalLM):
    """MiniCPM with DeepSeek-V2's latent attention, rotated by halves."""

    small_config: ClassVar[dict[str, Any]] = {
        "scale_emb": 4.0,
        "scale_depth": 1.4,
        "dim_model_base": 16,
        "tie_word_embeddings": False,
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
    }

    @classmethod
    def layer_spec(cls, config: Any) -> LayerSpec:
        return latent_layer(config, has_pairs=False)
