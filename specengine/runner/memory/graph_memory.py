"""The memory of CUDA graphs: the pool that they share, what they took, and what they may take."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from specengine.core.parallel import Communicator, NoLink
from specengine.core.platform import Platform, best_device, platform_of
from specengine.runner.fallbacks import MEMORY_SPENT

logger = logging.getLogger(__name__)
T = TypeVar("T")

_PLENTY = 0.75  # of the budget
_LITTLE = 16 << 20  # bytes that a graph may add to a spent budget
MOST_LAUNCHES = 32 << 20  # bytes that the driver keeps of one graph at most


class _Reading(NamedTuple):
    """In bytes."""

    free: int  # on the device; other processes may use the rest
    held: int  # by this process's allocator


class GraphMemory:
    """The memory of one engine's graphs, which share a pool because no two of them run at once.

    What graphs take is what this process's allocator holds more afterwards, and their launches,
    which the driver keeps and no allocator knows: what else the device has less, up to
    MOST_LAUNCHES a graph. Other processes use the device as well, and take memory or give it back
    during a capture; a device reports what is free, not which process has the rest.

    What a graph gives lies in the pool, where earlier graphs write when they run: read it, or copy
    it, before any other graph of the pool runs.
    """

    def __init__(
        self,
        budget: int | None = None,
        communicator: Communicator = NoLink.communicator,
        platform: Platform | None = None,
    ) -> None:
        """budget: bytes that were kept free for graphs; None for no limit. communicator: of ranks
        that capture the same graphs, which count what the one takes that has the least memory.
        platform: of the device; None is that of --device auto."""
        self.platform = platform or platform_of(best_device())
        self.budget = budget
        self.communicator = communicator
        self.used = 0  # bytes, measured
        self._before: _Reading | None = None  # the captures that failed since the last that did not
        self._left = 0  # bytes of `used` that those have left
        self._is_measuring = False
        self._num_graphs = 0  # of the last `measured`, at most
        self._pool: Any = None

    @property
    def pool(self) -> Any:
        if self._pool is None:
            self._pool = self.platform.graph_pool()
        return self._pool

    @property
    def is_spent(self) -> bool:
        return self.budget is not None and self.used >= self.budget

    @property
    def has_plenty(self) -> bool:
        """Whether graphs may be captured in the background and leave enough for those that requests
        will need."""
        return self.budget is None or self.used < _PLENTY * self.budget

    @contextmanager
    def measured(self) -> Iterator[Callable[[], int]]:
        """Count what is captured inside as used: a graph, or one in each inner `measured`. Gives a
        function that tells the bytes so far. Inside another `measured` it counts none: the outer
        one does."""
        if self._is_measuring or not self.platform.has_graphs:
            self._num_graphs += 1
            yield lambda: 0
            return
        self.platform.empty_cache()
        before = self._begin()
        self._is_measuring, self._num_graphs = True, 1
        try:
            yield lambda: self._taken_since(before) - self._left
        finally:
            self._is_measuring = False
        self.platform.empty_cache()
        self._count(self._taken_since(before))
        self._before, self._left = None, 0

    def _begin(self) -> _Reading:
        """Behind captures that failed, what they have left is used, too, and counted now: much of
        what one holds goes with its error. Measured from before the first of them, so that memory
        which one leaves and another gives back does not add up."""
        if self._before is None:
            self._before = self._read()
        else:
            self._count(self._taken_since(self._before))
        return self._before

    def _count(self, taken: int) -> None:
        """taken: bytes, since `_before`."""
        left = max(taken, 0)  # less where something else is gone
        self.used, self._left = self.used + left - self._left, left

    def _read(self) -> _Reading:
        return _Reading(self.platform.free_memory(), self.platform.held_memory())

    def _taken_since(self, before: _Reading) -> int:
        now = self._read()
        held = now.held - before.held
        launches = min(before.free - now.free - held, self._num_graphs * MOST_LAUNCHES)
        return self.communicator.greatest([held + max(launches, 0)])[0]

    def affordable(self, wanted: Sequence[T], what: str) -> Iterator[T]:
        """Give sizes one by one, from large to small, to be captured meanwhile; stop when the
        budget is spent. The sizes left out are served by larger ones.

        A spent budget alone stops nothing: graphs share the pool, so often the first one allocates
        all that the others need. It stops when the last capture added memory as well.
        """
        added = 0  # by the last capture; the first does not count
        with self.measured() as taken:
            for index, one in enumerate(wanted):
                before = taken()
                spent = self.budget is not None and self.used + before >= self.budget
                if spent and added > _LITTLE:
                    left = ", ".join(map(str, wanted[index:]))
                    logger.warning("%s: no %s of %s", MEMORY_SPENT, what, left)
                    return
                yield one
                added = taken() - before if index else 0

    def log(self) -> None:
        if self.used and self.budget is not None:
            used, budget = self.used / (1 << 30), self.budget / (1 << 30)
            logger.info("graphs take %.2f GiB, and may take %.2f GiB", used, budget)
