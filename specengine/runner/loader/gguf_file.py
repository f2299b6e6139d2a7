"""A GGUF file: its metadata and its tensors, dequantised one at a time."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from torch import Tensor

from specengine.core.errors import ModelLoadError


class _BoundedReader(GGUFReader):  # type: ignore[misc]
    """Refuses to read past the end: a corrupt array length would otherwise loop for hours."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        end = int(offset) + int(count) * np.dtype(dtype).itemsize
        if offset < 0 or end > len(self.data):
            raise ValueError(f"bytes {offset} to {end} lie outside its {len(self.data)} bytes")
        return super()._get(offset, dtype, count, override_order)


def _open(path: Path) -> GGUFReader:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            return _BoundedReader(path)
    except (ValueError, KeyError, IndexError, TypeError, OSError, OverflowError) as error:
        raise ModelLoadError(f"{path} is not a readable GGUF file: {error}") from error
    except RuntimeWarning as error:
        raise ModelLoadError(f"{path} is not a readable GGUF file: {error}") from error


_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


def parts_of(path: Path) -> list[Path]:
    """The files of a model that is split, in their order, whichever of them `path` is; or `path`
    alone. Raises ModelLoadError, naming a part that is missing."""
    found = _PART.fullmatch(path.name)
    if found is None:
        return [path]
    start, _, count = found.groups()
    names = [f"{start}-{part:05d}-of-{count}.gguf" for part in range(1, int(count) + 1)]
    parts = [path.with_name(name) for name in names]
    for part in parts:
        if not part.is_file():
            raise ModelLoadError(f"{part} is missing: {path.name} is one of {int(count)} parts")
    return parts


class GgufFile:
    """Metadata of a GGUF file by key, and its tensors by name, read lazily. Of a model that is
    split into several, the first has the metadata. A file that is not valid GGUF raises
    ModelLoadError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        readers = [_open(part) for part in parts_of(path)]
        self._reader = readers[0]
        self._tensors = {tensor.name: tensor for one in readers for tensor in one.tensors}

    @property
    def architecture(self) -> str:
        return str(self.require("general.architecture"))

    @property
    def tensor_names(self) -> list[str]:
        return list(self._tensors)

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value. `{arch}` in the key stands for the file's architecture."""
        if "{arch}" in key:
            key = key.format(arch=self.architecture)
        field = self._reader.fields.get(key)
        if field is None:
            return default
        try:
            return field.contents()
        except (ValueError, IndexError) as error:
            raise ModelLoadError(f"{self.path}: metadata {key!r} is corrupt: {error}") from error

    def require(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ModelLoadError(f"{self.path} has no metadata {key!r}; is it a language model?")
        return value

    def shape(self, name: str) -> tuple[int, ...]:
        """Rows first, as in PyTorch (the file stores the fastest dimension first)."""
        return tuple(int(n) for n in reversed(self._tensors[name].shape))

    def num_experts(self, name: str) -> int:
        """How many matrices a tensor of three dimensions holds. Raises ModelLoadError."""
        if len(self.shape(name)) not in (2, 3):
            raise ModelLoadError(
                f"{self.path}: tensor {name} has shape {list(self.shape(name))}; one of all "
                "experts has three dimensions, its biases two"
            )
        return self.shape(name)[0]

    def blocks(
        self, name: str, kinds: Collection[str], expert: int | None = None
    ) -> tuple[str, Tensor] | None:
        """The type of a matrix, in lower case, and its bytes, uint8 [rows, bytes], where it is one
        of `kinds`. expert: whose matrix, of a tensor of all experts."""
        tensor = self._tensors[name]
        kind = self.type_name(name)
        shape = self.shape(name)[0 if expert is None else 1 :]
        if kind not in kinds or len(shape) != 2:
            return None
        data = tensor.data if expert is None else tensor.data[expert]
        return kind, torch.from_numpy(np.array(data)).view(shape[0], -1)

    def type_name(self, name: str) -> str:
        """The type of a tensor, in lower case."""
        return str(self._tensors[name].tensor_type.name).lower()

    def dequantized(self, name: str, expert: int | None = None) -> Tensor:
        """A tensor in float32, from any type of the file. expert: of one of all experts, whose."""
        tensor, shape = self._tensors[name], self.shape(name)
        data = tensor.data if expert is None else tensor.data[expert]
        try:
            values = dequantize(data, tensor.tensor_type)
        except NotImplementedError as error:
            raise ModelLoadError(
                f"{self.path}: tensor {name} has type {tensor.tensor_type.name}, which cannot be "
                "dequantised here; use a file in Q4_0, Q4_1, Q4_K, Q5_K, Q6_K, Q8_0, F16 or BF16"
            ) from error
        own = shape if expert is None else shape[1:]
        return torch.from_numpy(np.array(values, dtype=np.float32)).reshape(own)
