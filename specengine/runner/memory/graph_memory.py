"""The memory of CUDA graphs: the pool that they share, what they took, and what they may take."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from specengine.core.parallel import Communicator, NoLink
from specengine.core.platform import Platform, best_device, platform_of
from specengine.runner.fallbacks import MEMORY_SPENT

logger = logging.getLogger(__name__)
T = TypeVar("T")

_PLENTY = 0.75  # of the budget
_LITTLE = 16 << 20  # bytes that a graph may add to a spent budget


class GraphMemory:
    """The memory of one engine's graphs, which share a pool because no two of them run at once.

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
        self._before_failure: int | None = None  # bytes that were free, where a capture failed
        self._is_measuring = False
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
        """Count what is captured inside as used. Gives a function that tells the bytes so far.
        Inside another `measured` it counts nothing: the outer one does."""
        if self._is_measuring or not self.platform.has_graphs:
            yield lambda: 0
            return
        self.platform.empty_cache()
        self._count_failure()
        free = self.platform.free_memory()
        self._is_measuring = True
        try:
            yield lambda: self._taken_since(free)
        except BaseException:
            self._before_failure = free  # most of what it holds now goes with the error
            raise
        finally:
            self._is_measuring = False
        self.platform.empty_cache()
        self.used += self._taken_since(free)

    def _count_failure(self) -> None:
        """What a failed capture has left is used, too. Counted before the next."""
        if self._before_failure is not None:
            self.used += max(self._taken_since(self._before_failure), 0)
            self._before_failure = None

    def _taken_since(self, free: int) -> int:
        """free: bytes, before."""
        return self.communicator.greatest([free - self.platform.free_memory()])[0]

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
