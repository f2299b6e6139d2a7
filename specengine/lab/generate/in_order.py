"""Things that come in any order, given back in the order of their numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class InOrder(Generic[T]):
    """Holds things back until all before them have come; numbers count up from `first`."""

    def __init__(self, first: int) -> None:
        self.next = first
        self._held: dict[int, T] = {}

    def put(self, number: int, thing: T) -> Iterator[T]:
        """Those that are due now."""
        self._held[number] = thing
        while self.next in self._held:
            due = self._held.pop(self.next)
            self.next += 1
            yield due
