"""Outputs of finished requests as a source of drafts, shared between requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from specengine.draft.ngram.index import NgramIndex

_SEPARATOR = -1  # between outputs; no token has this id, so that no match crosses it


class SharedCorpus:
    """At most `capacity` tokens of the latest outputs, in two generations of half the size: when
    the younger is full, the elder is dropped whole.

    What one user was answered can show in the timing of another: off unless asked for.
    """

    def __init__(self, capacity: int, min_match: int, max_match: int) -> None:
        self._generation_size = capacity // 2
        self._matches = (min_match, max_match)
        self._young = NgramIndex(*self._matches)
        self._old = NgramIndex(*self._matches)

    @property
    def num_tokens(self) -> int:
        return len(self._young.tokens) + len(self._old.tokens)

    def add(self, output_ids: Sequence[int]) -> None:
        """Keep a finished output, or the end of it where it is larger than a generation."""
        room = self._generation_size - 1
        kept = output_ids[max(0, len(output_ids) - room) :]
        if len(self._young.tokens) + len(kept) + 1 > self._generation_size:
            self._old, self._young = self._young, NgramIndex(*self._matches)
        self._young.extend([*kept, _SEPARATOR])

    def continuations(self, tail: Sequence[int], length: int) -> Iterator[list[int]]:
        """What followed `tail` elsewhere, best match first, the younger generation first."""
        for index in (self._young, self._old):
            for end in index.lookup(tail):
                found = index.tokens[end + 1 : end + 1 + length]
                if _SEPARATOR in found:
                    found = found[: found.index(_SEPARATOR)]
                if found:
                    yield found
