"""Finds a model by the name that the user gave."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from specengine.core.config import ModelConfig
from specengine.core.errors import ConfigError, ModelLoadError
from specengine.core.paths import user_path
from specengine.runner.loader.builtin import BUILTIN_MODELS, BuiltinModel
from specengine.runner.loader.generation_config import (
    read_eos_token_ids,
    read_sampling_defaults,
)
from specengine.runner.loader.gguf_config import eos_token_ids, gguf_hf_config
from specengine.runner.loader.gguf_file import GgufFile, parts_of
from specengine.runner.loader.hf_config import make_config
from specengine.runner.loader.hf_directory import read_config, read_quantization
from specengine.runner.loader.hub import fetch_from_hub, is_hub_id
from specengine.runner.loader.model_source import ModelSource
from specengine.runner.loader.pooling import as_decoder, read_pooling
from specengine.runner.loader.tied_head import untie_own_head

__all__ = ["CACHE_VARIABLE", "ModelSource", "cache_directory", "resolve_model"]

CACHE_VARIABLE = "SPECENGINE_CACHE_DIR"


def resolve_model(config: ModelConfig, reads_sampling: bool = False) -> ModelSource:
    """Find a model by built-in name, directory, GGUF file or hub id, in this order.

    Fetches and converts a model that is not local. reads_sampling: its sampling_defaults. Raises
    ModelLoadError where it is not there or cannot be read, or ConfigError where --load-format does
    not fit the model.
    """
    try:
        source = replace(_find(config), is_dummy=config.load_format == "dummy")
        _check_load_format(source, config.load_format)
        if not reads_sampling or source.directory is None:
            return source
        return replace(source, sampling_defaults=read_sampling_defaults(source.directory))
    except OSError as error:
        raise ModelLoadError(
            f"cannot read the model {config.model!r}: {error}; see to its files and their "
            "permissions, or give another name"
        ) from error


def cache_directory(config: ModelConfig) -> Path:
    """Where converted models are stored."""
    given = config.cache_dir or os.environ.get(CACHE_VARIABLE)
    return user_path(given) if given else Path.home() / ".cache" / "specengine"


def _find(config: ModelConfig) -> ModelSource:
    name = config.model
    path = user_path(name)
    if name in BUILTIN_MODELS:
        return _builtin(BUILTIN_MODELS[name], cache_directory(config))
    if path.is_dir():
        return _directory(path, path.resolve().name)
    if path.is_file():
        return _file(path)
    if is_hub_id(name) and path.suffix != ".gguf":
        with_weights = config.load_format != "dummy"
        return _directory(fetch_from_hub(name, with_weights), name)
    raise ModelLoadError(
        f"there is no model {name!r}: neither a file or directory, nor a hub id (owner/name), nor "
        f"one of the built-in names {', '.join(BUILTIN_MODELS)}"
    )


def _builtin(model: BuiltinModel, cache: Path) -> ModelSource:
    if model.obtain is not None:
        return _directory(model.obtain(cache), model.name)
    quantization = model.config.get("quantization_config", {})
    return ModelSource(model.name, make_config(model.config), quantization=quantization)


def _directory(directory: Path, name: str) -> ModelSource:
    gguf_files = sorted(directory.glob("*.gguf"))
    if gguf_files and not (directory / "config.json").is_file():
        if gguf_files != parts_of(gguf_files[0]):
            names = ", ".join(file.name for file in gguf_files)
            raise ModelLoadError(f"{directory} has several GGUF files: name one of {names}")
        return _file(gguf_files[0])
    hf_config = read_config(directory)
    untie_own_head(hf_config, directory)
    eos = read_eos_token_ids(directory, hf_config)
    pooling = read_pooling(directory)
    if pooling is not None:
        hf_config = as_decoder(hf_config)
    return ModelSource(
        name,
        hf_config,
        directory=directory,
        eos_token_ids=eos,
        quantization=read_quantization(directory),
        pooling=pooling,
    )


def _file(path: Path) -> ModelSource:
    file = GgufFile(path)
    eos = frozenset(eos_token_ids(file))
    return ModelSource(path.stem, gguf_hf_config(file), gguf_file=path, eos_token_ids=eos)


def _check_load_format(source: ModelSource, load_format: str) -> None:
    if source.is_shape and not source.is_dummy:
        raise ConfigError(f"{source.name} is a shape without weights: add --load-format dummy")
    if load_format == "safetensors" and source.gguf_file is not None:
        raise ConfigError(f"--load-format safetensors, but {source.gguf_file} is a GGUF file")
    if load_format == "gguf" and source.gguf_file is None:
        raise ConfigError(f"--load-format gguf, but {source.name} is not a GGUF file")
