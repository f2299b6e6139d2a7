"""A model with its weights, tokenizer and configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from specengine.core.config import EngineConfig
from specengine.core.model import DecoderModel
from specengine.core.parallel import Communicator, Link, NoLink
from specengine.core.region import Region
from specengine.core.sharing import ExpertSharers
from specengine.runner.loader.model_source import ModelSource


@dataclass(frozen=True)
class LoadedModel:
    """Engines with different settings can share one."""

    source: ModelSource
    config: EngineConfig  # resolved, of the engine that loaded it
    model: DecoderModel
    tokenizer: Any
    link: Link = field(default_factory=NoLink)  # to the other ranks that have parts of it
    region: Region | None = None  # memory that can be given back, with --enable-sleep-mode
    sharers: ExpertSharers | None = None  # ranks that have parts of its experts alone

    @property
    def ranks(self) -> Communicator:
        """That plan memory and capture graphs together."""
        return self.link.communicator if self.sharers is None else self.sharers.experts

    @property
    def device(self) -> torch.device:
        return torch.device(self.config.model.device)
