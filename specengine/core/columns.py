"""Columns of integers that cross to a device in one copy.

Each begins at a multiple of 16 bytes: Triton compiles a kernel anew for tensors that do not, and
which of them do would follow from how many requests there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

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
    """Of the columns when they are joined."""
    return sum(map(_room, sizes))


def parted_columns(buffer: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Views of columns that were joined, without the filling."""
    parts = torch.split(buffer, [_room(size) for size in sizes])
    return [part[:size] for part, size in zip(parts, sizes, strict=True)]


def _room(size: int) -> int:
    return size + -size % _ALIGNED
