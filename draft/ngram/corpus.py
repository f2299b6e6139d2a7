"""Outputs of finished requests as a source of drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from specengine.draft.ngram.index import NgramIndex
from specengine.draft.rotating_corpus import RotatingCorpus, until_separator


class SharedCorpus:
    """The latest outputs, at most `capacity` tokens of them, indexed."""

    def __init__(self, capacity: int, min_match: int, max_match: int) -> None:
        self._outputs = RotatingCorpus(capacity, lambda: NgramIndex(min_match, max_match))

    @property
    def num_tokens(self) -> int:
        return self._outputs.num_tokens

    def add(self, output_ids: Sequence[int]) -> None:
        self._outputs.add(output_ids)

    def continuations(self, tail: Sequence[int], length: int) -> Iterator[list[int]]:
        """What followed `tail` elsewhere, best match first, the younger generation first."""
        for index in self._outputs.texts:
            for end in index.lookup(tail):
                if found := until_separator(index.tokens[end + 1 : end + 1 + length]):
                    yield found
