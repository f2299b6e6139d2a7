"""From a ModelSource to a model that is ready to run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from specengine.core.errors import ModelLoadError, OutOfMemoryError
from specengine.layers.linear_cpu import pack_linears
from specengine.runner.loader.dummy import fill_with_random
from specengine.runner.loader.gguf_file import GgufFile
from specengine.runner.loader.gguf_weights import iterate_gguf_weights
from specengine.runner.loader.hf_directory import iterate_safetensors
from specengine.runner.loader.model_source import ModelSource
from specengine.runner.loader.pooling import as_decoder_name

FindModelClass = Callable[[Sequence[str]], Any]


def load_model(
    source: ModelSource,
    find_model_class: FindModelClass,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str | None = None,
    seed: int = 0,
) -> nn.Module:
    """Build the model, fill its weights and pack them for the device.

    find_model_class: architecture names -> model class (target.registry, handed in by the engine).
    seed: of dummy weights. Raises ModelLoadError, ConfigError or OutOfMemoryError.
    """
    model_class = model_class_of(source, find_model_class)
    with _out_of_memory_named(source, device), torch.no_grad():
        with _tensors_are(dtype, device):
            model = _build(model_class, source)
        if source.is_dummy:
            fill_with_random(model, seed)
        else:
            model.load_weights(iterate_weights(source))  # type: ignore[operator]
        pack_linears(model, quantization)
    return model.eval()


def model_class_of(source: ModelSource, find_model_class: FindModelClass) -> Any:
    """Raises ModelLoadError for an architecture that is not supported, naming those that are. Asked
    before anything else is read: other architectures lack other fields."""
    model_type = getattr(source.hf_config, "model_type", None)
    return find_model_class(source.architectures or [f"of model_type {model_type!r}"])


def _build(model_class: Any, source: ModelSource) -> nn.Module:
    try:
        model: nn.Module = model_class(source.hf_config)
    except AttributeError as error:
        raise ModelLoadError(
            f"config.json of {source.name} does not fit {model_class.__name__}, which it names as "
            f"its architecture: {error}"
        ) from error
    return model


def iterate_weights(source: ModelSource) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, tensor on CPU) of every weight; for a source with files."""
    if source.gguf_file is not None:
        return iterate_gguf_weights(GgufFile(source.gguf_file))
    assert source.directory is not None
    found = iterate_safetensors(source.directory)
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
