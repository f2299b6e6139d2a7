"""Embedding models: how sentence-transformers' files say that hidden states become a vector."""

from __future__ import annotations

from copy import copy
from pathlib import Path
from typing import Any

from specengine.core.errors import ModelLoadError
from specengine.core.pooling import Pooling
from specengine.runner.loader.hf_directory import read_json

# Keys of the pooling module's config.json that this engine computes.
_MODES = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean"}
_OTHER_NAMES = {"lasttoken": "last", "mean": "mean"}  # of `pooling_mode`, in newer files


def read_pooling(directory: Path) -> Pooling | None:
    """None where the directory holds no embedding model. ModelLoadError where its vectors are made
    in a way that is not supported."""
    path = directory / "modules.json"
    if not path.is_file():
        return None
    kinds = {_kind(one): one for one in read_json(path, list)}
    if "Pooling" not in kinds:
        return None
    other = kinds.keys() - {"Transformer", "Pooling", "Normalize"}
    if other:
        raise ModelLoadError(f"{path} has the module {min(other)}, which is not supported")
    config = directory / str(kinds["Pooling"].get("path", "")) / "config.json"
    return Pooling(_mode(config), "Normalize" in kinds)


def as_decoder(hf_config: Any) -> Any:
    """The configuration of an embedding model as its family's decoder has it: such checkpoints name
    the model without its head, whose weights they may lack."""
    config = copy(hf_config)
    names = list(getattr(config, "architectures", None) or [])
    if any(name.endswith("Model") for name in names):
        config.architectures = [name.removesuffix("Model") + "ForCausalLM" for name in names]
        config.tie_word_embeddings = True  # a head that nothing reads
    return config


def as_decoder_name(name: str) -> str:
    """The name that a decoder's checkpoint gives to a weight."""
    return name if name.startswith(("model.", "lm_head.")) else "model." + name


def _kind(module: Any) -> str:
    named = module.get("type") if isinstance(module, dict) else None
    return str(named).rpartition(".")[2]


def _mode(config: Path) -> str:
    fields = read_json(config)
    named = {key for key, value in fields.items() if key.startswith("pooling_mode_") and value}
    if len(named) == 1 and (key := named.pop()) in _MODES:
        return _MODES[key]
    if not named and fields.get("pooling_mode") in _OTHER_NAMES:
        return _OTHER_NAMES[str(fields["pooling_mode"])]
    raise ModelLoadError(f"{config} asks for a way of pooling that is not {' or '.join(_MODES)}")
