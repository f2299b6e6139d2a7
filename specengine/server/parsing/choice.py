"""One choice of an answer, parsed as its text comes."""

from __future__ import annotations

from collections.abc import Callable

from specengine.server.parsing.answer import Delta, ParsedAnswer
from specengine.server.parsing.reader import Reader, Steps

Read = Callable[[Reader, ParsedAnswer], Steps[None]]  # up to the end of the text


class ChoiceParser:
    """Runs `read` on a text that is fed in pieces."""

    def __init__(self, read: Read, answer: ParsedAnswer) -> None:
        self.answer = answer
        self._reader = Reader()
        self._steps = read(self._reader, answer)

    def feed(self, text: str, ended: bool = False) -> list[Delta]:
        """What the text adds; the last piece has `ended`."""
        self._reader.feed(text, ended)
        next(self._steps, None)
        if ended:
            self.answer.finish()
        return self.answer.take()
