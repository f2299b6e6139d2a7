"""From a ModelSource to a model that is ready to run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from specengine.core.errors import ConfigError, ModelLoadError, OutOfMemoryError
from specengine.core.registry import LOAD_QUANTIZATIONS, load_place
from specengine.layers.linear import deferred_weights
from specengine.layers.linear_cpu import pack_linears
from specengine.layers.moves import moving_with
from specengine.layers.quantization.gguf import KEPT, KEPT_OF_EXPERTS
from specengine.layers.quantization.linears import (
    close_linears,
    fill_linears,
    make_quantization,
    open_linears,
)
from specengine.layers.quantization.method import Quantization
from specengine.runner.loader.dummy import fill_with_random
from specengine.runner.loader.gguf_file import GgufFile
from specengine.runner.loader.gguf_weights import Kept, iterate_gguf_weights
from specengine.runner.loader.hf_directory import iterate_safetensors
from specengine.runner.loader.kv_scales import KvScales
from specengine.runner.loader.language_part import language_tensors
from specengine.runner.loader.mapped_files import MappedFiles
from specengine.runner.loader.model_source import ModelSource
from specengine.runner.loader.mover import mover_to
from specengine.runner.loader.pooling import as_decoder_name

FindModelClass = Callable[[Sequence[str]], Any]


def load_model(
    source: ModelSource,
    find_model_class: FindModelClass,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str | None = None,
    seed: int = 0,
    context_length: int | None = None,
    fp8_kv: bool = False,
    packs: bool = True,
) -> nn.Module:
    """Build the model, fill its weights and pack them for the device.

    find_model_class: architecture names -> model class (target.registry, handed in by the engine).
    seed: of dummy weights. context_length: tokens that requests may have, which LongRoPE asks; None
    is what the model was made for. fp8_kv: K and V will be kept in FP8, with the scales of the
    files. packs: put weights into the form that a CPU multiplies fastest. Raises ModelLoadError,
    ConfigError or OutOfMemoryError.
    """
    model_class = model_class_of(source, find_model_class)
    method = quantization_of(source, quantization)
    with ExitStack() as reading, _out_of_memory_named(source, device), torch.no_grad():
        with _tensors_are(dtype, device), deferred_weights() if method else nullcontext():
            model = _build(model_class, _served(source, context_length))
        if method is not None:
            open_linears(model)
        if source.is_dummy:
            fill_with_random(model, seed)
            if method is not None:
                left_out = source.quantization.get("modules_to_not_convert") or ()
                fill_linears(model, method, seed, left_out)
        else:
            scales, mover = KvScales(), mover_to(device)
            files = None if mover is None else mover.files
            if mover is not None:
                reading.enter_context(moving_with(mover))
            weights = scales.taken_from(iterate_weights(source, method, files))
            model.load_weights(weights)  # type: ignore[operator]
            if fp8_kv:
                scales.apply(model)
        if method is not None:
            close_linears(model, method, dtype)
        if packs:
            pack_linears(model, None if quantization in LOAD_QUANTIZATIONS else quantization)
    return model.eval()


def quantization_of(source: ModelSource, wanted: str | None) -> Quantization | None:
    """The files' method, or the one of LOAD_QUANTIZATIONS that is wanted of floating point weights.
    Raises ModelLoadError for a method that is not known, ConfigError where both are there."""
    fields = source.quantization
    if fields and wanted is not None and wanted != fields.get("quant_method"):
        raise ConfigError(
            f"--quantization {wanted}: the weights of {source.name} are quantised already, by "
            f"{fields.get('quant_method')}; leave it out"
        )
    if fields:
        return make_quantization(fields)
    if wanted not in LOAD_QUANTIZATIONS:
        return None
    made: Quantization = load_place(LOAD_QUANTIZATIONS[wanted]).from_fields({})
    if made.keeps_gguf and source.gguf_file is None:
        return None  # a drafter beside a GGUF target
    return made


def check_quantization(source: ModelSource, wanted: str | None) -> None:
    """Raises ConfigError where what --quantization asks for is not there in the target."""
    if wanted not in LOAD_QUANTIZATIONS:
        return
    if load_place(LOAD_QUANTIZATIONS[wanted]).keeps_gguf and source.gguf_file is None:
        raise ConfigError(f"--quantization {wanted}, but {source.name} is not a GGUF file")


def model_class_of(source: ModelSource, find_model_class: FindModelClass) -> Any:
    """Raises ModelLoadError for an architecture that is not supported, naming those that are. Asked
    before anything else is read: other architectures lack other fields."""
    model_type = getattr(source.hf_config, "model_type", None)
    return find_model_class(source.architectures or [f"of model_type {model_type!r}"])


def _served(source: ModelSource, context_length: int | None) -> ModelSource:
    """With `served_context` in its configuration (layers.rotary.rope_parameters), and positions for
    all of a longer context than it was made for (layers.rotary.longest_context)."""
    if context_length is None:
        return source
    config = copy(source.hf_config)
    config.served_context = context_length
    made_for = getattr(config, "max_position_embeddings", context_length)
    if context_length > made_for:
        config.made_for, config.max_position_embeddings = made_for, context_length
    return replace(source, hf_config=config)


# What comes of fields that are missing, of another length or size than others, or of another type.
_UNFIT = (AttributeError, IndexError, KeyError, TypeError, ValueError, ZeroDivisionError)


def _build(model_class: Any, source: ModelSource) -> nn.Module:
    try:
        model: nn.Module = model_class(source.hf_config)
    except _UNFIT as error:
        raise ModelLoadError(
            f"config.json of {source.name} does not fit {model_class.__name__}, which it names as "
            f"its architecture: {type(error).__name__} {error}"
        ) from error
    return model


def iterate_weights(
    source: ModelSource, method: Quantization | None = None, files: MappedFiles | None = None
) -> Iterable[tuple[str, Tensor]]:
    """(checkpoint name, tensor on CPU) of every weight; for a source with files. Of a multimodal
    model those of its language part. files: where the tensors of safetensors are found again."""
    if source.gguf_file is not None:
        keeps = method is not None and method.keeps_gguf
        kept = Kept(KEPT, KEPT_OF_EXPERTS) if keeps else None
        return iterate_gguf_weights(GgufFile(source.gguf_file), kept)
    assert source.directory is not None
    found = language_tensors(iterate_safetensors(source.directory, files), source.hf_config)
    if source.pooling is None:
        return found
    return ((as_decoder_name(name), tensor) for name, tensor in found)


@contextmanager
def _tensors_are(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """New tensors in the body have this dtype and device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _out_of_memory_named(source: ModelSource, device: torch.device) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"the weights of {source.name} do not fit on {device}: {error}. Free the device, or "
            "take a smaller model (--model)"
        ) from error
