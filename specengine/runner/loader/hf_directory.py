"""A model directory as Hugging Face lays it out: config.json and safetensors files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from specengine.core.errors import ModelLoadError
from specengine.runner.loader.hf_config import make_config
from specengine.runner.loader.mapped_files import MappedFiles

# Files whose reading may run any code.
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def read_config(directory: Path) -> Any:
    """The configuration of a local directory; never runs code that comes with it."""
    if not (directory / "config.json").is_file():
        raise ModelLoadError(f"{directory} has no config.json; it is not a model directory")
    fields = read_json(directory / "config.json")
    try:
        config = make_config(fields)
    except Exception as error:
        raise ModelLoadError(f"{directory / 'config.json'} cannot be used: {error}") from error
    return config


def read_quantization(directory: Path) -> dict[str, Any]:
    """What a directory says of quantised weights, with `quant_method`; empty for none. ModelOpt's
    checkpoints may say it in hf_quant_config.json alone."""
    fields = read_json(directory / "config.json")
    for holder in (fields, fields.get("text_config")):
        if isinstance(holder, dict):
            found = holder.get("quantization_config") or holder.get("compression_config")
            if isinstance(found, dict):
                return found
    path = directory / "hf_quant_config.json"
    if not path.is_file():
        return {}
    return {"quant_method": "modelopt", **read_json(path)}


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model: those its index names, or else every one there is."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        return _indexed_files(index)
    whole = directory / "model.safetensors"
    files = [whole] if whole.is_file() else sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelLoadError(_no_weights_message(directory))
    return files


def iterate_safetensors(
    directory: Path, files: MappedFiles | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every weight, one at a time, whose bytes are read where they are used. A
    file that cannot be read raises ModelLoadError naming it. files: where views are found again."""
    for path in weight_files(directory):
        yield from (MappedFiles() if files is None else files).tensors(path)


def read_tensor_shapes(directory: Path) -> dict[str, list[int]]:
    """Shape of every weight by name, without reading any."""
    shapes = {}
    for path in weight_files(directory):
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                shapes[name] = list(file.get_slice(name).get_shape())
    return shapes


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path} is not a readable safetensors file: {error}") from error


def _indexed_files(index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index} has no weight_map")
    files = [index.parent / Path(str(name)).name for name in sorted(set(weight_map.values()))]
    for path in files:
        if not path.is_file():
            raise ModelLoadError(f"{path} is missing; {index.name} names it")
    return files


def _no_weights_message(directory: Path) -> str:
    pickled = [path.name for pattern in PICKLED for path in directory.glob(pattern)]
    if pickled:
        return (
            f"{directory} has pickled weights only ({pickled[0]}); unpickling can run any code, so "
            f"they are refused. Take safetensors of the model; a draft of EAGLE is rewritten by: "
            f"specengine convert {directory} NEW-DIR"
        )
    return f"{directory} has no *.safetensors file"


def read_json(path: Path, kind: type = dict) -> Any:
    """kind: of what the file holds. Raises ModelLoadError for another, or none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, kind):
        raise ModelLoadError(f"{path} is not a JSON {'object' if kind is dict else 'array'}")
    return found
