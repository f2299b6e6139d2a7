"""Which user turns and answers are worth learning from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# The longest cycle that is looked for at the end of an answer, and how often it must have been
# repeated; as many of its repetitions are kept.
MAX_PERIOD = 96
CYCLES = 3
# A loop of a single token is none before it has this many.
MIN_LOOP = 24
# Long texts with fewer different words than this share are repetitive.
MIN_DISTINCT = 0.25
DISTINCT_FROM = 24


class Dropped(Exception):
    """A conversation, or its next turn, is given up; `reason` is counted."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def check_words(words: Sequence[str], min_words: int) -> None:
    """Raise Dropped for a user turn that is too short, or says the same over and over."""
    if len(words) < min_words:
        raise Dropped("prompt too short")
    if len(words) >= DISTINCT_FROM and len(set(words)) < MIN_DISTINCT * len(words):
        raise Dropped("prompt repetitive")


def loop_start(token_ids: Sequence[int]) -> int | None:
    """Where the cycle begins that the tokens end in, or None where they do not repeat themselves
    to the end."""
    ids = np.asarray(token_ids)
    best: int | None = None
    for period in range(1, min(MAX_PERIOD, len(ids) // CYCLES) + 1):
        differs = np.flatnonzero(ids[period:] != ids[:-period])
        start = int(differs[-1]) + 1 if len(differs) else 0
        length = len(ids) - start
        is_loop = length >= max(CYCLES * period, MIN_LOOP)
        if is_loop and (best is None or start < best):
            best = start
    return best


def trim_loop(token_ids: list[int]) -> list[int]:
    """The tokens without the endless repetition they end in, but for its first cycles."""
    start = loop_start(token_ids)
    if start is None:
        return token_ids
    tail = token_ids[start:]
    period = next(p for p in range(1, len(tail)) if tail[p:] == tail[:-p])
    return token_ids[: start + max(CYCLES * period, MIN_LOOP)]
