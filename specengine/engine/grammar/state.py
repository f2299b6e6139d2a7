"""Where one output stands in its grammar."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from specengine.core.grammar import Words


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
