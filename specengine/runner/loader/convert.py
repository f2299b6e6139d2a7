"""Converts a GGUF file to a Hugging Face directory: bf16 safetensors, config, tokenizer."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from specengine.core.errors import ModelLoadError
from specengine.runner.loader.gguf_config import eos_token_ids, gguf_hf_config
from specengine.runner.loader.gguf_file import GgufFile
from specengine.runner.loader.gguf_weights import iterate_gguf_weights
from specengine.runner.loader.tokenizer import gguf_tokenizer


def convert_gguf(source: Path, directory: Path) -> None:
    """Write the model of a GGUF file to `directory`, in the layout that transformers loads too."""
    file = GgufFile(source)
    gguf_hf_config(file).save_pretrained(directory)
    weights = {
        name: tensor.to(torch.bfloat16).contiguous() for name, tensor in iterate_gguf_weights(file)
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    gguf_tokenizer(file).save_pretrained(directory)
    generation = {
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos_token_ids(file),
        "pad_token_id": file.get("tokenizer.ggml.padding_token_id"),
    }
    text = json.dumps({key: value for key, value in generation.items() if value is not None})
    (directory / "generation_config.json").write_text(text)


def create_directory(directory: Path, fill: Callable[[Path], None]) -> Path:
    """Create and fill a directory unless it exists.

    It appears complete or not at all: it is filled beside its final path, then renamed. Of two
    processes at the same time the first to finish wins; both get the same content.
    """
    if directory.exists():
        return directory
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".making-") as scratch:
            made = Path(scratch) / directory.name
            made.mkdir()
            fill(made)
            _rename_unless_there(made, directory)
    except OSError as error:
        raise ModelLoadError(
            f"cannot write {directory}: {error}; choose another place with --cache-dir"
        ) from error
    return directory


def _rename_unless_there(made: Path, directory: Path) -> None:
    try:
        made.rename(directory)
    except OSError:
        if not directory.is_dir():
            raise
        shutil.rmtree(made)
