"""Which models, template and data a report is about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specengine.core.config import ModelConfig, SpecConfig
from specengine.draft.loaded import draft_directory
from specengine.draft.train.data.fingerprint import tokenizer_sha256
from specengine.draft.zoo.shipped import draft_path_of
from specengine.lab.accept.prompts import PromptSet
from specengine.lab.environment import sha256_of_files, sha256_of_text
from specengine.runner.loader.builtin import BUILTIN_MODELS
from specengine.runner.loader.hf_directory import weight_files
from specengine.runner.loader.loaded_model import LoadedModel
from specengine.runner.loader.source import ModelSource, resolve_model


def target_identity(loaded: LoadedModel) -> dict[str, Any]:
    """Hashes are SHA-256; null where there are no files, or no template."""
    tokenizer, config = loaded.tokenizer, loaded.config.model
    template = tokenizer.chat_template
    return {
        "name": loaded.source.name,
        "weights_sha256": weights_sha256(loaded.source),
        "dtype": config.dtype,
        "quantization": config.quantization,
        "device": config.device,
        "tokenizer_sha256": tokenizer_sha256(tokenizer),
        "chat_template_sha256": sha256_of_text(str(template)) if template else None,
    }


def draft_identity(spec: SpecConfig, config: ModelConfig) -> dict[str, Any] | None:
    """None where no model drafts, or it lies within the target."""
    path = draft_path_of(spec, config)
    if path is None:
        return None
    if path in BUILTIN_MODELS:
        source = resolve_model(ModelConfig(model=path, cache_dir=config.cache_dir))
        return {"path": path, "weights_sha256": weights_sha256(source)}
    directory = draft_directory(path)
    return {
        "path": path,
        "weights_sha256": sha256_of_files(weight_files(directory)),
        "config_sha256": sha256_of_files([directory / "config.json"]),
    }


def data_identity(one: PromptSet) -> dict[str, Any]:
    return {
        "name": one.name,
        "source": one.source,
        "sha256": one.sha256,
        "prompts": len(one.prompts),
        "available": one.available,
    }


def weights_sha256(source: ModelSource) -> str | None:
    files: list[Path] = []
    if source.is_dummy:
        return None
    if source.directory is not None:
        files = weight_files(source.directory)
    elif source.gguf_file is not None:
        files = [source.gguf_file]
    return sha256_of_files(files) if files else None
