"""From a checkpoint's MTP layers to models that draft for a loaded target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from specengine.core.errors import ModelLoadError
from specengine.draft.mtp.checkpoint import MtpCheckpoint
from specengine.draft.mtp.form import DEEPSEEK, MIMO, MtpLayerName
from specengine.draft.mtp.model import MtpModel
from specengine.runner.loader.load import load_model
from specengine.runner.loader.model_source import ModelSource


@dataclass(frozen=True)
class LoadOptions:
    """How the target was loaded, which its MTP layers follow."""

    dtype: torch.dtype
    device: torch.device
    quantization: str | None = None
    seed: int = 0  # of dummy weights


def find_layers(
    target_source: ModelSource, draft_source: ModelSource | None
) -> tuple[ModelSource, tuple[MtpLayerName, ...]]:
    """Where the MTP layers of a target are, and which they are. Dummy targets get dummy layers of
    their family's form. Raises ModelLoadError where there are none that fit."""
    source = draft_source or target_source
    if source.is_dummy:
        return source, _dummy_layers(target_source)
    if source.directory is None:
        raise ModelLoadError(
            f"{source.name} is no directory of safetensors, and MTP layers are read from those "
            "only; name one with --speculative-draft-model-path"
        )
    found = MtpCheckpoint.find(source.directory, target_source.hf_config.hidden_size)
    return source, found.layers


def load_layers(
    source: ModelSource, layers: Sequence[MtpLayerName], target: Any, options: LoadOptions
) -> list[MtpModel]:
    """One model a layer, which writes KV layer 0, 1, ... of the draft pool and shares the target's
    embedding and head. target: a model of target/models."""
    return [_load(source, name, kv_layer, target, options) for kv_layer, name in enumerate(layers)]


def _load(
    source: ModelSource, name: MtpLayerName, kv_layer: int, target: Any, options: LoadOptions
) -> MtpModel:
    config = target.config
    shape, window = target.decoder_shape(config), target.sliding_windows(config)[-1]

    def model_class(config: Any) -> MtpModel:
        return MtpModel(config, shape, name, kv_layer, window)

    # The layers are of the target's shape, whatever configuration stands beside them.
    loaded = load_model(
        replace(source, hf_config=config),
        lambda architectures: model_class,
        options.dtype,
        options.device,
        options.quantization,
        options.seed + 1 + kv_layer,
    )
    model = cast(MtpModel, loaded)
    model.share(target.model.embed_tokens, target.lm_head)
    return model


def _dummy_layers(target: ModelSource) -> tuple[MtpLayerName, ...]:
    config = target.hf_config
    count = getattr(config, "num_nextn_predict_layers", None) or 1
    if "MiMoForCausalLM" in target.architectures:
        return tuple(MtpLayerName(MIMO, index) for index in range(count))
    first = config.num_hidden_layers
    return tuple(MtpLayerName(DEEPSEEK, first + index) for index in range(count))
