"""Safetensors files whose tensors are views of mapped memory: nothing is read until one is used.

A file is 8 bytes, the length of a header; the header, JSON that gives each tensor's type, shape
and place; and the tensors' bytes (https://huggingface.co/docs/safetensors). The library
`safetensors` checks a file. The views are made here, so that a view's place in its file is known.
"""

from __future__ import annotations

import json
import mmap
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specengine.core.errors import ModelLoadError

_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


@dataclass(frozen=True)
class FileSpan:
    """Bytes `start` to `stop` of a file."""

    path: Path
    start: int
    stop: int


def num_bytes_spanned(tensor: Tensor) -> int:
    """From its first element to behind its last, what lies between rows of a view included."""
    if tensor.is_contiguous():
        return int(tensor.nbytes)
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (sum((size - 1) * stride for size, stride in steps) + 1) * tensor.element_size()


class MappedFiles:
    """Files that are kept mapped as long as this lives. A mapping is no open file."""

    def __init__(self) -> None:
        self._addresses: list[int] = []  # where mappings begin, in ascending order
        self._files: list[tuple[Path, Tensor]] = []  # in the same order; uint8, all of the file

    def tensors(self, path: Path) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor on the host) of a file, in the file's order. Raises ModelLoadError for one
        that is not whole. Writing to a tensor changes no file."""
        try:
            with safe_open(path, framework="pt", device="cpu") as checked:
                header, start, whole = _mapped(path)
                self._add(path, whole)
                for name, entry in header.items():
                    if name == "__metadata__":
                        continue
                    is_known = entry["dtype"] in _TYPES
                    yield name, _view(whole, start, entry) if is_known else checked.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{path} is not a readable safetensors file: {error}") from error

    def find(self, tensor: Tensor) -> FileSpan | None:
        """Where the bytes of a view lie. None for a tensor that is no view of these files, and for
        views of a file one of which was written to: the file does not have what was written."""
        if tensor.device.type != "cpu" or tensor._version:
            return None
        address = tensor.data_ptr()
        index = bisect_right(self._addresses, address) - 1
        if index < 0:
            return None
        path, whole = self._files[index]
        start = address - self._addresses[index]
        stop = start + num_bytes_spanned(tensor)
        size = whole.numel()
        return FileSpan(path, start, stop) if start < size and stop <= size else None

    def _add(self, path: Path, whole: Tensor) -> None:
        index = bisect_right(self._addresses, whole.data_ptr())
        self._addresses.insert(index, whole.data_ptr())
        self._files.insert(index, (path, whole))


def _mapped(path: Path) -> tuple[dict[str, Any], int, Tensor]:
    """The header, where the bytes of tensors begin, and all bytes. The library has checked it."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return header, 8 + length, torch.frombuffer(mapping, dtype=torch.uint8)


def _view(whole: Tensor, start: int, entry: dict[str, Any]) -> Tensor:
    dtype, shape = _TYPES[entry["dtype"]], entry["shape"]
    first, stop = (start + offset for offset in entry["data_offsets"])
    if first == stop:
        return torch.empty(shape, dtype=dtype)
    if first % dtype.itemsize:  # old writers aligned nothing
        return whole[first:stop].clone().view(dtype).view(shape)
    return whole[first:stop].view(dtype).view(shape)
