"""Drafters on disk, in the layouts that draft/eagle and draft/mtp read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specengine.draft.rope import draft_rope
from specengine.draft.train.vocabulary import DraftVocabulary
from specengine.layers.layer_spec import LayerSpec

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def write_drafter(
    directory: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], dtype: torch.dtype
) -> None:
    """Floating-point tensors in `dtype`; tables of tokens as they are."""
    saved = {
        name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None)
        for name, tensor in tensors.items()
    }
    contiguous = {name: tensor.contiguous() for name, tensor in saved.items()}
    save_file(contiguous, directory / "model.safetensors", metadata={"format": "pt"})
    name = str(dtype).removeprefix("torch.")
    text = json.dumps({**config, "torch_dtype": name}, indent=2)
    (directory / "config.json").write_text(text + "\n", encoding="utf-8")


def eagle3_config(
    target: Any, shape: LayerSpec, vocabulary: DraftVocabulary, feature_layers: tuple[int, ...]
) -> dict[str, Any]:
    """config.json in SGLang's and SpecForge's form, which vLLM reads too: it counts layers by what
    they read, beside eagle_config. target: the target's configuration."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "max_position_embeddings": target.max_position_embeddings,
        **_rope(target),
        "vocab_size": vocabulary.target_vocab_size,
        "draft_vocab_size": vocabulary.size,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": target.bos_token_id,
        "eos_token_id": target.eos_token_id,
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in feature_layers],
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(feature_layers),
            "use_aux_hidden_state": True,
        },
    }


def dflash_config(
    target: Any,
    shape: LayerSpec,
    vocab_size: int,
    sizes: tuple[int, int, int],
    feature_layers: tuple[int, ...],
) -> dict[str, Any]:
    """config.json in z-lab's form, which counts layers by their output from 0. target: the target's
    configuration. sizes: layers, tokens of a block, and the token that masks."""
    num_layers, block_size, mask_token_id = sizes
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "num_hidden_layers": num_layers,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "max_position_embeddings": target.max_position_embeddings,
        **_rope(target),
        "vocab_size": vocab_size,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "num_target_layers": target.num_hidden_layers,
        "block_size": block_size,
        "dflash_config": {
            "target_layer_ids": list(feature_layers),
            "mask_token_id": mask_token_id,
        },
    }


def vocabulary_tensors(vocabulary: DraftVocabulary) -> dict[str, Tensor]:
    """Nothing where the draft has the whole vocabulary."""
    if vocabulary.is_whole:
        return {}
    return {"d2t": vocabulary.d2t(), "t2d": vocabulary.t2d()}


def _rope(target: Any) -> dict[str, Any]:
    parameters = draft_rope(target)
    theta = parameters.pop("rope_theta")
    scaling = None if parameters["rope_type"] == "default" else parameters
    return {"rope_theta": theta, "rope_scaling": scaling}
