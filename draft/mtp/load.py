"""From a checkpoint's MTP layers to models that draft for a loaded target."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from specengine.core.config import SpecConfig
from specengine.core.errors import ConfigError, ModelLoadError
from specengine.draft.loaded import DraftTarget, LoadedDraft, draft_directory
from specengine.draft.mtp.checkpoint import find_layers
from specengine.draft.mtp.form import DEEPSEEK, MtpForm, MtpLayerName, form_named
from specengine.draft.mtp.model import MtpModel
from specengine.runner.loader.hf_directory import read_quantization
from specengine.runner.loader.load import load_model
from specengine.runner.loader.model_source import ModelSource
from specengine.runner.memory.kv_shape import kv_shape_of


def load_mtp(target: DraftTarget) -> LoadedDraft:
    """The target's own MTP layers, those of --speculative-draft-model-path, or those that ship for
    it: one, or as many as there are steps. Raises ConfigError or ModelLoadError where they are
    missing or do not fit."""
    source = _source(target)
    if target.is_dummy:
        form = form_named(cast(Any, target.loaded.model).mtp_form)
        found = _dummy_layers(source.hf_config, form)
    else:
        found = find_layers(*_place(source, target))
    names = _one_a_step(found, target.spec)
    models = tuple(_load(source, name, index, target) for index, name in enumerate(names))
    shape = kv_shape_of(models, target.dtype)
    return LoadedDraft(models, shape, feature_size=target.hidden_size)


def _source(target: DraftTarget) -> ModelSource:
    """Where the layers are, with the target's configuration: they are of its shape, whatever
    else the checkpoint holds. How they are quantised is what their own config.json says; without
    one, they are as the target."""
    source = target.loaded.source
    path = None if target.is_dummy else target.find_draft_model()
    if path is None:
        return source
    directory = draft_directory(path)
    has_own = (directory / "config.json").is_file()
    quantization = read_quantization(directory) if has_own else source.quantization
    return ModelSource(path, source.hf_config, directory=directory, quantization=quantization)


def _place(source: ModelSource, target: DraftTarget) -> tuple[Path, int]:
    if source.directory is None:
        raise ModelLoadError(
            f"{source.name} is not a directory of safetensors, and MTP layers are read from those "
            "only; name one with --speculative-draft-model-path"
        )
    return source.directory, target.hidden_size


def _dummy_layers(config: Any, form: MtpForm) -> tuple[MtpLayerName, ...]:
    """As many as the target's configuration states."""
    count = getattr(config, "num_nextn_predict_layers", None) or 1
    first = config.num_hidden_layers if form is DEEPSEEK else 0
    return tuple(MtpLayerName(form, first + index) for index in range(count))


def _one_a_step(layers: tuple[MtpLayerName, ...], spec: SpecConfig) -> tuple[MtpLayerName, ...]:
    """The layers that num_steps steps use. A single one serves them all."""
    steps, count = spec.num_steps, len(layers)
    assert steps is not None, "resolved"
    if count == 1 or steps == 1:
        return layers[:1]
    if spec.eagle_topk > 1:
        raise ConfigError(
            f"--speculative-eagle-topk {spec.eagle_topk}: the {count} MTP layers of this "
            "checkpoint draft chains, a layer a step; leave it out"
        )
    if steps > count:
        raise ConfigError(
            f"--speculative-num-steps {steps}: the checkpoint has {count} MTP layers, one a step; "
            f"ask for {count} at most"
        )
    return layers[:steps]


def _load(source: ModelSource, name: MtpLayerName, index: int, target: DraftTarget) -> MtpModel:
    target_model, options = cast(Any, target.loaded.model), target.loaded.config.model
    config = source.hf_config
    spec, own = target_model.mtp_spec(config), target_model.own_tensors
    loaded = load_model(
        replace(source, is_dummy=target.is_dummy),
        lambda architectures: lambda config: MtpModel(config, spec, name, index, own),
        target.dtype,
        target.loaded.device,
        options.quantization,
        options.random_seed + 1 + index,
        options.context_length,
    )
    model = cast(MtpModel, loaded)
    model.share(target_model.embed, target_model.head)
    model.share_norm(target_model.model.norm)
    return model
