"""A bounded corpus of earlier outputs, shared between requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Generic, Protocol, TypeVar


class IndexedText(Protocol):
    """A text that can be searched, and grows."""

    tokens: list[int]

    def extend(self, new: Sequence[int]) -> None: ...


T = TypeVar("T", bound=IndexedText)


class RotatingCorpus(Generic[T]):
    """At most `capacity` tokens of the latest outputs, in two generations of half the size: when
    the younger is full, the elder is dropped whole, since no index can forget a part of its text.

    A separator ends each output: a negative number that occurs once, so that no match crosses it.

    What one user was answered can show in the timing of another: off unless asked for.
    """

    def __init__(self, capacity: int, make: Callable[[], T]) -> None:
        self._size = capacity // 2
        self._make = make
        self._young = make()
        self._old = make()

    @property
    def texts(self) -> list[T]:
        """Those that hold anything, the younger first."""
        return [text for text in (self._young, self._old) if text.tokens]

    @property
    def num_tokens(self) -> int:
        """Separators included."""
        return len(self._young.tokens) + len(self._old.tokens)

    def add(self, output_ids: Sequence[int]) -> None:
        """Keep a finished output, or the end of it where it is larger than a generation."""
        kept = output_ids[max(0, len(output_ids) - (self._size - 1)) :]
        if len(self._young.tokens) + len(kept) + 1 > self._size:
            self._old, self._young = self._young, self._make()
        self._young.extend([*kept, -1 - len(self._young.tokens)])


def until_separator(tokens: Iterable[int]) -> list[int]:
    return list(takewhile(lambda token: token >= 0, tokens))
