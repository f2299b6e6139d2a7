"""Text that arrives in pieces, read by generators.

A reading function is a generator: it yields while it needs more text, and returns its result. It
decides only on what no later text can change, so that its result does not depend on how the text
was cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from specengine.engine.detokenizer import held_back

T = TypeVar("T")
Steps = Generator[None, None, T]
Sink = Callable[[str], object]

_SPACE = re.compile(r"\s*")


def ignore(text: str) -> None:
    """A Sink for text that nobody needs."""


class Reader:
    """A place in a text, of which more may come."""

    def __init__(self) -> None:
        self._text = ""
        self._place = 0
        self._marks: list[int] = []  # where `back` goes; what follows the first is kept
        self._ended = False

    def feed(self, text: str, ended: bool = False) -> None:
        """Append text; nothing comes after `ended`."""
        start = self._marks[0] if self._marks else self._place
        self._text = self._text[start:] + text
        self._place -= start
        self._marks = [place - start for place in self._marks]
        self._ended = ended

    def mark(self) -> None:
        """Keep the text from here on, until `back` or `keep`, which end the last mark."""
        self._marks.append(self._place)

    def back(self) -> None:
        """Return to the mark."""
        self._place = self._marks.pop()

    def keep(self) -> None:
        """Stay."""
        self._marks.pop()

    def skip(self, count: int) -> None:
        """Pass over characters that were peeked at."""
        self._place += count

    def peek(self, count: int = 1) -> Steps[str]:
        """The next characters; fewer at the end of the text."""
        while len(self._text) < self._place + count and not self._ended:
            yield
        return self._text[self._place : self._place + count]

    def take(self, literal: str) -> Steps[bool]:
        """Pass over `literal`; False, and nothing is taken, where it does not come next. Waits only
        while it still may."""
        while True:
            next_text = self._text[self._place : self._place + len(literal)]
            if next_text == literal:
                self._place += len(literal)
                return True
            if self._ended or not literal.startswith(next_text):
                return False
            yield

    def run(self, pattern: re.Pattern[str], sink: Sink) -> Steps[None]:
        """Hand on characters as long as they match. pattern: a repeated class of characters."""
        while True:
            match = pattern.match(self._text, self._place)
            assert match is not None, "the pattern must match nothing as well"
            if match[0]:
                sink(match[0])
            self._place = match.end()
            if self._place < len(self._text) or self._ended:
                return
            yield

    def skip_space(self) -> Steps[None]:
        return self.run(_SPACE, ignore)

    def upto(self, marks: Sequence[str], sink: Sink) -> Steps[str | None]:
        """Hand on what comes before the first of `marks`, and pass over that one; of several that
        end at one place, the longest. Gives it, or None at the end of the text."""
        longest = max(map(len, marks))
        while True:
            found = self._find(marks)
            if found is not None:
                self._hand_on(found[1], sink)
                self._place = found[0]
                return self._text[found[1] : found[0]]
            tail = self._text[max(self._place, len(self._text) - longest) :]
            self._hand_on(len(self._text) - (0 if self._ended else held_back(tail, marks)), sink)
            if self._ended:
                return None
            yield

    def rest(self, sink: Sink) -> Steps[None]:
        """Hand on everything, up to the end of the text."""
        while True:
            self._hand_on(len(self._text), sink)
            if self._ended:
                return
            yield

    def _find(self, marks: Sequence[str]) -> tuple[int, int] | None:
        """(end, start) of the mark that is complete first."""
        starts = [(self._text.find(mark, self._place), len(mark)) for mark in marks]
        return min(((at + size, at) for at, size in starts if at >= 0), default=None)

    def _hand_on(self, end: int, sink: Sink) -> None:
        if end > self._place:
            sink(self._text[self._place : end])
            self._place = end
