"""Columns of 64-bit numbers that cross to a device in one copy.

Each begins at a multiple of 16 bytes: Triton compiles a kernel anew for tensors that do not, and
which of them do would follow from how many requests there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from specengine.core.transfer import sent

_ALIGNED = 2  # int64s
_FILLING = np.zeros(1, dtype=np.int64)


def joined_columns(columns: Iterable[ArrayLike]) -> NDArray[np.int64]:
    parts = []
    for column in columns:
        parts.append(np.asarray(column, dtype=np.int64))
        if len(parts[-1]) % _ALIGNED:
            parts.append(_FILLING)
    return np.concatenate(parts)


def columns_size(sizes: Iterable[int]) -> int:
    """Numbers in the columns when they are joined."""
    return sum(size + _filling(size) for size in sizes)


def parted_columns(buffer: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Views of columns that were joined, without the filling."""
    parts = torch.split(buffer, [part for size in sizes for part in (size, _filling(size))])
    return list(parts[::2])


def sent_columns(columns: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """int64 each, on the device."""
    flat = torch.from_numpy(joined_columns(columns))
    return parted_columns(sent(flat, device), [len(column) for column in columns])


def _filling(size: int) -> int:
    return -size % _ALIGNED


class Columns:
    """Named host columns that cross to the device in a single copy."""

    def __init__(self) -> None:
        self._arrays: dict[str, np.ndarray[Any, Any]] = {}

    def ints(self, name: str, values: Sequence[int] | np.ndarray[Any, Any]) -> None:
        self._arrays[name] = np.asarray(values, dtype=np.int64)

    def floats(self, name: str, values: Sequence[float]) -> None:
        self._arrays[name] = np.asarray(values, dtype=np.float64)

    def ragged(self, name: str, rows: Sequence[int], values: Sequence[Sequence[int]]) -> None:
        """Flatten values[i], which belong to rows[i], into `{name}_rows` and `{name}_tokens`."""
        counts = [len(v) for v in values]
        self._arrays[f"{name}_rows"] = np.repeat(np.asarray(rows, dtype=np.int64), counts)
        self.ints(f"{name}_tokens", list(chain.from_iterable(values)))

    def send(self, device: torch.device) -> dict[str, Tensor]:
        """int64 and float64 tensors, views of one buffer."""
        if not self._arrays:
            return {}
        flat = torch.from_numpy(joined_columns(a.view(np.int64) for a in self._arrays.values()))
        parts = parted_columns(sent(flat, device), [len(a) for a in self._arrays.values()])
        return {
            name: part if array.dtype == np.int64 else part.view(torch.float64)
            for (name, array), part in zip(self._arrays.items(), parts, strict=True)
        }


def request_columns(rows: list[int], prefix_lens: list[int], extend_lens: list[int]) -> Columns:
    """Columns of a batch: one entry a request, and, in those with names in _T, one a new token: the
    row of its request in the page table, and its place in that row. The host computes in
    microseconds what would be a dozen launches on a device."""
    rows_B, prefix_B, extend_B = np.array((rows, prefix_lens, extend_lens), dtype=np.int64)
    indptr = np.append(0, extend_B.cumsum())
    columns = Columns()
    columns.ints("req_pool_indices", rows_B)
    columns.ints("prefix_lens", prefix_B)
    columns.ints("extend_lens", extend_B)
    columns.ints("seq_lens", prefix_B + extend_B)
    columns.ints("qo_indptr", indptr)
    columns.ints("rows_T", rows_B.repeat(extend_B))
    columns.ints("places_T", np.arange(indptr[-1]) + (prefix_B - indptr[:-1]).repeat(extend_B))
    return columns
