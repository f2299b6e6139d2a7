"""Builds the target: when an engine starts, and when its weights are replaced."""

from __future__ import annotations

import torch
from torch import nn

from specengine.core.config import ModelConfig
from specengine.core.parallel import Communicator, split_over
from specengine.core.sharing import ExpertSharers, sharing_experts
from specengine.engine.resolve import torch_dtype
from specengine.runner.loader.load import load_model
from specengine.runner.loader.model_source import ModelSource
from specengine.target.registry import find_model_class


def load_target(
    source: ModelSource,
    model: ModelConfig,
    device: torch.device,
    ranks: Communicator,
    sharers: ExpertSharers | None,
    packs: bool = True,
) -> nn.Module:
    """This rank's part of the model, with the weights of `source`. model: resolved. packs: put
    weights into the form that a CPU multiplies fastest. Raises ModelLoadError, ConfigError or
    OutOfMemoryError."""
    with split_over(ranks), sharing_experts(sharers):
        return load_model(
            source,
            find_model_class,
            torch_dtype(model.dtype),
            device,
            model.quantization,
            model.random_seed,
            model.context_length,
            fp8_kv=model.kv_cache_dtype == "fp8",
            packs=packs,
        )
