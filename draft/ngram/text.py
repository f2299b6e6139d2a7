"""A request's own text as a source of drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from specengine.core.request import Req
from specengine.draft.ngram.index import NgramIndex
from specengine.draft.reading import unread


class RequestText:
    """Prompt and output of one request, indexed as they grow."""

    def __init__(self, req: Req, min_match: int, max_match: int) -> None:
        self._req = req
        self._index = NgramIndex(min_match, max_match)

    @property
    def num_tokens(self) -> int:
        return len(self._index.tokens)

    def update(self, most: int | None = None, said: Sequence[int] = ()) -> None:
        """Take in the tokens that came since, the prompt's at first; at most so many. said: more of
        them, which are not committed yet."""
        if new := [*unread(self._req, self.num_tokens, most), *said]:
            self._index.extend(new)

    @property
    def last_token(self) -> int:
        return self._index.tokens[-1]

    @property
    def tail(self) -> list[int]:
        return self._index.tokens[-self._index.max_match :]

    def continuations(self, length: int) -> Iterator[list[int]]:
        """What followed each earlier occurrence of the end of the text, best match first."""
        return (self._after(end, length) for end in self._index.lookup(self.tail))

    def _after(self, end: int, length: int) -> list[int]:
        """A continuation that runs into the end of the text reads on in what it has drafted: the
        text since the occurrence repeats."""
        period = self._index.tokens[end + 1 : end + 1 + length]
        repeats = -(-length // len(period))
        return (period * repeats)[:length]
