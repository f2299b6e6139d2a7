"""The grammar state of one output."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

    from specengine.core.grammar import Words

_MOST_THREADS = 8


class LlguidanceState:
    """A GrammarState on a matcher of llguidance. Cost: microseconds a call; a mask up to some
    milliseconds where a part of the grammar is met for the first time."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def is_complete(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def error(self) -> str | None:
        return self._matcher.get_error() or None

    def accept(self, token: int) -> bool:
        return self._matcher.try_consume_tokens([token]) == 1

    def take_back(self, count: int) -> None:
        if count:
            self._matcher.rollback(count)

    def fill_mask(self, words: Words) -> None:
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)

    def fork(self) -> LlguidanceState:
        """An independent state at the same place; O(tokens since the beginning)."""
        return LlguidanceState(self._matcher.deep_copy())


Chain = tuple[LlguidanceState, list[int]]  # and the tokens drafted after that state


def fill_chains(chains: Sequence[Chain], words_MW: Words) -> None:
    """What may follow each state and each of its tokens, on all cores at once; the states are
    left unchanged. words_MW: contiguous, 1 + len(tokens) rows a chain, in order. Rows behind a
    token that the grammar forbids stay as they were."""
    roots, jobs, first = [], [], 0
    for state, tokens in chains:
        if tokens:
            jobs.append((state._matcher, first, tokens))
        else:
            roots.append((state._matcher, first))
        first += 1 + len(tokens)
    assert first == len(words_MW)
    place = words_MW.ctypes.data, words_MW.shape[1] * words_MW.itemsize, first
    if roots:
        _executor().unsafe_compute_mask_ptr(roots, *place)
    if jobs:
        _executor().unsafe_compute_mask_ptr_with_draft_token(jobs, *place)


@cache
def _executor() -> LLExecutor:
    from llguidance import LLExecutor

    return LLExecutor(min(len(os.sched_getaffinity(0)), _MOST_THREADS))
