"""Whether a checkpoint's head is its embedding, whatever its configuration says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from specengine.layers.weights import renamed
from specengine.runner.loader.family import tensor_names
from specengine.runner.loader.hf_directory import iterate_safetensors
from specengine.runner.loader.language_part import language_tensors

_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"


def untie_own_head(config: Any, directory: Path) -> None:
    """Set `tie_word_embeddings` to false where the files have a head that differs from the
    embedding. Configurations that do not state it get transformers' default, which is true for
    Mistral 3, whose published models have a head of their own. transformers decides so, too."""
    if not getattr(config, "tie_word_embeddings", False) or not any(
        directory.glob("*.safetensors")
    ):
        return
    found = {}
    names = tensor_names(getattr(config, "architectures", None))
    for name, tensor in renamed(language_tensors(iterate_safetensors(directory), config), names):
        if name == _HEAD or name.endswith(_EMBEDDING):
            found[_HEAD if name == _HEAD else _EMBEDDING] = tensor
    if len(found) == 2 and not torch.equal(found[_HEAD], found[_EMBEDDING]):
        config.tie_word_embeddings = False
