"""Draft models: what they are loaded for, and what comes of it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from specengine.core.config import ModelConfig, SpecConfig
from specengine.core.errors import ConfigError, ModelLoadError
from specengine.core.model import DecoderModel
from specengine.core.paths import user_path
from specengine.draft.zoo.shipped import SHIPPED_DRAFTERS, draft_path_of
from specengine.memory.kv_cache import KVShape
from specengine.runner.loader.hub import fetch_from_hub, is_hub_id
from specengine.runner.loader.load import FindModelClass
from specengine.runner.loader.loaded_model import LoadedModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DraftTarget:
    """What a draft model is loaded for."""

    spec: SpecConfig  # resolved
    loaded: LoadedModel
    context_length: int  # positions that a request can have
    dtype: torch.dtype
    find_model_class: FindModelClass

    @property
    def hidden_size(self) -> int:
        return int(self.loaded.source.hf_config.hidden_size)

    @property
    def is_dummy(self) -> bool:
        """Its weights are random, and so are the draft's."""
        return self.loaded.source.is_dummy

    def find_draft_model(self) -> str | None:
        """The draft model that was named, or ships for the target, which the log then says."""
        target = self.loaded.config.model
        path = draft_path_of(self.spec, target)
        if path is not None and self.spec.draft_model_path is None:
            logger.info("drafting with %s, the drafter that ships for %s", path, target.model)
        return path

    def draft_model_path(self) -> str:
        """Raises ConfigError where no draft model was named and none ships for the target."""
        path = self.find_draft_model()
        if path is None:
            raise ConfigError(
                f"--speculative-algorithm {self.spec.algorithm} drafts with a model; name it with "
                "--speculative-draft-model-path"
            )
        return path

    def draft_model_config(self) -> ModelConfig:
        """The target's, but for the name of the model, or, of a shipped drafter, its directory.
        Raises ConfigError as above."""
        load_format = "dummy" if self.is_dummy else "auto"
        config = self.loaded.config.model
        path = self.draft_model_path()
        model = str(SHIPPED_DRAFTERS[path].directory) if path in SHIPPED_DRAFTERS else path
        return replace(config, model=model, load_format=load_format)


@dataclass(frozen=True)
class LoadedDraft:
    """A drafter's weights in place."""

    models: tuple[DecoderModel, ...]  # one, or one a level
    kv_shape: KVShape  # layers of all of them together
    feature_layers: tuple[int, ...] = ()  # target layers whose outputs it reads, ascending
    feature_size: int | None = None  # width of what a model takes in beside tokens


NO_DRAFT = LoadedDraft((), KVShape(0, 1, 1, torch.float32))


def draft_directory(path: str, with_weights: bool = True, pickled: bool = False) -> Path:
    """That of a shipped drafter, a local one, or what a hub id names. pickled: its weights may be
    so. Raises ModelLoadError."""
    if path in SHIPPED_DRAFTERS:
        return SHIPPED_DRAFTERS[path].directory
    directory = user_path(path)
    if directory.is_dir():
        return directory
    if not is_hub_id(path):
        raise ModelLoadError(
            f"--speculative-draft-model-path {path}: neither a directory nor a hub id, nor "
            f"one of the built-in names {', '.join(SHIPPED_DRAFTERS)}"
        )
    return fetch_from_hub(path, with_weights, pickled)
