"""Memory that an engine gives back while it sleeps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from weakref import WeakSet

from torch import Tensor


class Region(ABC):
    """Tensors whose memory is given back to the machine, and comes back at the same addresses: what
    points there, such as a captured graph, is valid again then. In between nothing may touch them.

    find: gives all tensors of the region; set before `release` by its caller, and called
    where the platform cannot know by itself what was allocated in it. users: the Sleepers that may
    release it.
    """

    find: Callable[[], Iterator[Tensor]] = staticmethod(lambda: iter(()))

    def __init__(self) -> None:
        self.users: WeakSet[object] = WeakSet()

    @abstractmethod
    def allocating(self) -> AbstractContextManager[object]:
        """Device memory that the body takes belongs to the region."""

    @abstractmethod
    def release(self, dropped: Iterable[Tensor]) -> int:
        """Give the memory back. What it holds is kept elsewhere, but for `dropped`. Waits for the
        device. Returns the bytes given back. Raises ConfigError where it cannot; then nothing has
        changed."""

    @abstractmethod
    def restore(self) -> None:
        """Take the memory again, as it was; what was dropped is zeros. Raises OutOfMemoryError
        where another has taken it; then nothing has changed."""


def in_region(region: Region | None) -> AbstractContextManager[object]:
    """Where there is one."""
    return nullcontext() if region is None else region.allocating()
