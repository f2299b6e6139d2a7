"""Time counters around methods, put on and taken off again."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

Around = Callable[[str], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Watched:
    """A method of an object, as a part of a round."""

    owner: Any
    method: str
    part: str


class Stopwatch:
    """Seconds of parts, each without the parts within it. sync: called at every border, so that
    what a device still does counts where it was asked for."""

    def __init__(self, sync: Callable[[], None] | None = None) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.counts: Counter[str] = Counter()
        self._sync = sync
        self._open: list[str] = []
        self._since = 0.0

    def clear(self) -> None:
        """Forget what was counted; open parts go on from here."""
        self.seconds.clear()
        self.counts.clear()
        self._since = perf_counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._border()
        self._open.append(name)
        try:
            yield
        finally:
            self._border()
            self._open.pop()
            self.counts[name] += 1

    def _border(self) -> None:
        if self._sync is not None:
            self._sync()
        now = perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now


@contextmanager
def watching(watched: list[Watched], around: Around) -> Iterator[None]:
    """Run every call of these methods within `around(part)`."""
    with ExitStack() as stack:
        for one in watched:
            stack.enter_context(_replaced(one, around))
        yield


@contextmanager
def _replaced(one: Watched, around: Around) -> Iterator[None]:
    method = getattr(one.owner, one.method)

    def timed(*args: Any, **kwargs: Any) -> Any:
        with around(one.part):
            return method(*args, **kwargs)

    hidden = vars(one.owner).get(one.method)
    setattr(one.owner, one.method, timed)
    try:
        yield
    finally:
        if hidden is None:
            delattr(one.owner, one.method)
        else:
            setattr(one.owner, one.method, hidden)
