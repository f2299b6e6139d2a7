"""Llama models on disk, in Hugging Face layout: read to begin with, written to be served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from specengine.core.errors import ConfigError, ModelLoadError
from specengine.draft.train.llama import Llama
from specengine.layers.weights import fill_places, weight_places
from specengine.runner.loader.hf_directory import iterate_safetensors, read_config

if TYPE_CHECKING:
    from specengine.draft.train.causal_lm import ModelShape

_ARCHITECTURE = "LlamaForCausalLM"


def make_llama(shape: ModelShape, tokenizer: Any, vocab_size: int) -> Llama:
    """A new model of this shape in float32, or that of shape.init with its weights.

    Raises ConfigError or ModelLoadError where shape.init is no Llama of this vocabulary.
    """
    if shape.init is None:
        return Llama(_new_config(shape, tokenizer, vocab_size), shape.compiles)
    directory = Path(shape.init)
    config = read_config(directory)
    found = list(getattr(config, "architectures", None) or [])
    if found != [_ARCHITECTURE] or config.attention_bias or config.mlp_bias:
        raise ModelLoadError(
            f"task.init={shape.init} is {' '.join(found) or 'of no named architecture'}; only "
            f"{_ARCHITECTURE} without biases is trained"
        )
    if config.vocab_size != vocab_size:
        raise ConfigError(
            f"task.init={shape.init} has {config.vocab_size} tokens, the vocabulary {vocab_size}"
        )
    llama = Llama(config, shape.compiles)
    ignored = ["lm_head.weight"] if config.tie_word_embeddings else []
    with torch.no_grad():
        fill_places(weight_places(llama, {}), iterate_safetensors(directory), "Llama", ignored)
    return llama


def _new_config(shape: ModelShape, tokenizer: Any, vocab_size: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        architectures=[_ARCHITECTURE],
        vocab_size=vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=shape.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=shape.tie_embeddings,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def save_model(directory: Path, llama: Llama, tokenizer: Any, dtype: torch.dtype) -> None:
    """Weights in `dtype`, configuration and tokenizer."""
    weights = {
        name: tensor.detach().to("cpu", dtype).contiguous()
        for name, tensor in llama.named_parameters()  # a shared one under its first name alone
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    llama.config.dtype = str(dtype).removeprefix("torch.")
    llama.config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    generation = {"eos_token_id": tokenizer.eos_token_id}
    (directory / "generation_config.json").write_text(json.dumps(generation) + "\n", "utf-8")
