"""Collectives of processes on one host, through memory that all have mapped: for ranks on a CPU.

Gloo's would do, and cost more than what they add up: three threads for each sum, one of which looks
for messages again and again while the rank itself is late for them, on a core that this needs.
"""

from __future__ import annotations

import mmap
import os
import time
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from specengine.core.parallel import Communicator
from specengine.core.shared_words import Words, unnamed_file, wait_for
from specengine.runner.communicators.lost import RanksLostError

_LINE = 64  # bytes of a counter, which has a cache line of its own
_PART = 1 << 20  # bytes of a tensor that move at once
_PATIENCE = 600.0  # seconds; a rank may load while others wait


class HostMemoryCommunicator(Communicator):
    """Each rank writes a part into its own place and counts it; all then read all places, and add
    up in the order of ranks. Places are taken by turns: when all have counted a part, all have read
    the one before it."""

    def __init__(self, file: int, rank: int, size: int) -> None:
        """file: rank 0's, which this process has inherited; closed with this object."""
        self.file, self.rank, self.size = file, rank, size
        weakref.finalize(self, os.close, file)
        # No tensor stays: an engine that sleeps gives back what it can reach.
        self._memory = mmap.mmap(file, os.fstat(file).st_size)
        self._counts = Words(self._memory, size * _LINE)
        self._count = 0
        self._is_aborted = False

    @classmethod
    def create(cls, size: int) -> HostMemoryCommunicator:
        """Rank 0's, before the others are started."""
        return cls(unnamed_file(size * (_LINE + 2 * _PART)), 0, size)

    def all_reduce(self, x: Tensor) -> Tensor:
        if not x.numel():
            return x
        x = x.contiguous()
        for part in torch.split(x.view(-1), _PART // x.itemsize):
            first, second, *others = self._exchange(part)
            torch.add(first, second, out=part)
            for one in others:
                part += one
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        if not x.numel():
            return x.expand(self.size, *x.shape)
        parts = torch.split(x.flatten(), _PART // x.itemsize)
        found = [torch.stack(self._exchange(part)) for part in parts]
        return torch.cat(found, dim=1).view(self.size, *x.shape)

    def greatest(self, numbers: Sequence[int]) -> list[int]:
        rows = self.all_gather(torch.tensor(list(numbers), dtype=torch.int64)).tolist()
        return [max(column) for column in zip(*rows, strict=True)]

    def abort(self) -> None:
        """Let go of a call that waits for a rank that is gone. From any thread."""
        self._is_aborted = True

    def _exchange(self, part: Tensor) -> list[Tensor]:
        """[n] of each rank, to be read before the next call."""
        self._count += 1
        start = self.size * _LINE + self._count % 2 * self.size * _PART
        places = [
            torch.frombuffer(
                self._memory, dtype=part.dtype, count=len(part), offset=start + rank * _PART
            )
            for rank in range(self.size)
        ]
        places[self.rank].copy_(part)
        self._counts[self.rank * _LINE] = self._count
        self._deadline = time.monotonic() + _PATIENCE
        wait_for(self._have_all_come, self._check)
        return places

    def _have_all_come(self) -> bool:
        return all(self._counts[rank * _LINE] >= self._count for rank in range(self.size))

    def _check(self) -> None:
        if self._is_aborted:
            raise RanksLostError("another rank has ended amid a collective", self)
        if time.monotonic() > self._deadline:
            message = f"another rank has not come to a collective in {_PATIENCE:.0f} s"
            raise RanksLostError(message, self)
