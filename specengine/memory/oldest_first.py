"""What may be evicted, in the order in which it goes."""

from __future__ import annotations

import heapq
from itertools import count
from typing import Generic, Protocol, TypeVar


class Used(Protocol):
    last_access: int


T = TypeVar("T", bound=Used)


class OldestFirst(Generic[T]):
    """A set that gives the least recently used of its things in O(log n), however often they were
    used since they came: memory that is full evicts something in nearly every round.

    The heap holds each thing under the time at which it came, or one that was never later than its
    last use; what comes up too early goes back under its true time. `last_access` may only grow.
    """

    def __init__(self) -> None:
        self._things: dict[T, None] = {}  # in order: ranks that share a model evict alike
        self._heap: list[tuple[int, int, T]] = []
        self._order = count()  # of things of the same time

    def __len__(self) -> int:
        return len(self._things)

    def add(self, thing: T) -> None:
        if thing in self._things:
            return
        self._things[thing] = None
        if len(self._heap) > 2 * len(self._things) + 64:
            self._heap = [self._entry(one) for one in self._things]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, self._entry(thing))

    def discard(self, thing: T) -> None:
        self._things.pop(thing, None)

    def pop(self) -> T | None:
        """Takes it out. None where nothing is left."""
        while self._heap:
            time, _, thing = heapq.heappop(self._heap)
            if thing not in self._things:
                continue
            if time != thing.last_access:
                heapq.heappush(self._heap, self._entry(thing))
                continue
            del self._things[thing]
            return thing
        return None

    def _entry(self, thing: T) -> tuple[int, int, T]:
        return thing.last_access, next(self._order), thing
