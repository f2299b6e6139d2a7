"""Ranks that are not there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from specengine.core.parallel import Communicator, split_over

T = TypeVar("T")


class PretendedRanks(Communicator):
    """Several ranks that all hold what this one does. A sum that was not made shows."""

    def __init__(self, size: int, rank: int = 0) -> None:
        self.size, self.rank = size, rank

    def all_reduce(self, x: Tensor) -> Tensor:
        return x * self.size

    def all_gather(self, x: Tensor) -> Tensor:
        return x.expand(self.size, *x.shape)

    def greatest(self, numbers: Sequence[int]) -> list[int]:
        return list(numbers)


class ThreadRanks(Communicator):
    """Ranks that are threads of this process."""

    def __init__(self, rank: int, size: int, meeting: threading.Barrier, table: list[Any]) -> None:
        self.rank, self.size = rank, size
        self._meeting, self._table = meeting, table

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.all_gather(x).sum(0).to(x.dtype)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.stack(self._exchange(x))

    def greatest(self, numbers: Sequence[int]) -> list[int]:
        return [max(found) for found in zip(*self._exchange(numbers), strict=True)]

    def _exchange(self, mine: Any) -> list[Any]:
        self._table[self.rank] = mine
        self._meeting.wait()
        found = list(self._table)
        self._meeting.wait()
        return found


def on_threads(size: int, run: Callable[[], T]) -> list[T]:
    """What `run` gives on each rank; layers that it makes are split over them."""
    meeting, table = threading.Barrier(size, timeout=120), [None] * size

    def one(rank: int) -> T:
        with split_over(ThreadRanks(rank, size, meeting, table)), torch.no_grad():
            return run()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))
