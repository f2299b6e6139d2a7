"""Tokens into text as they come: whole characters only, cut at stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specengine.core.request import FinishReason
from specengine.core.sampling import SamplingParams
from specengine.engine.tokens import vocabulary_of

_UTF8 = codecs.getincrementaldecoder("utf-8")


class IncrementalDecoder:
    """Tokens in, whole characters out; the bytes of an unfinished character wait for the rest."""

    def __init__(
        self,
        tokenizer: Any,
        skip_special_tokens: bool = True,
        visible: frozenset[int] = frozenset(),
    ) -> None:
        """visible: special tokens that are not skipped."""
        vocabulary = vocabulary_of(tokenizer)
        shown = vocabulary.shown_with(visible)
        self._pieces = shown if skip_special_tokens else vocabulary.pieces
        self._utf8 = _UTF8(errors="replace")

    def add(self, token_ids: Sequence[int], final: bool = False) -> str:
        """With `final`, an unfinished character comes out as U+FFFD."""
        return self._utf8.decode(self._pieces.joined(token_ids), final)


def decoder_of(tokenizer: Any, sampling: SamplingParams) -> IncrementalDecoder:
    """A decoder of the text that a request shows, which is searched for its stop strings."""
    return IncrementalDecoder(tokenizer, sampling.skip_special_tokens, sampling.visible_special_ids)


@dataclass(frozen=True, slots=True)
class StopMatch:
    start: int
    end: int


def find_stop(text: str, stops: Sequence[str], first_end: int = 1) -> StopMatch | None:
    """The stop string that is complete first, reading `text` character by character; of several
    that end there, the longest. One that ends before `first_end` does not count."""
    best: StopMatch | None = None
    for stop in stops:
        start = text.find(stop, max(0, first_end - len(stop)))
        end = start + len(stop)
        if start >= 0 and (best is None or (end, start) < (best.end, best.start)):
            best = StopMatch(start, end)
    return best


def held_back(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of `text` could be the beginning of a stop string."""
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:size]):
                longest = size
                break
    return longest


class Detokenizer:
    """The text of one choice.

    The text ends before the first stop string (after it, with include_stop_str_in_output); until
    then, text that could be the beginning of one is held back. Stop strings that the first
    min_tokens tokens complete do not count.
    """

    def __init__(self, tokenizer: Any, sampling: SamplingParams) -> None:
        self.text = ""  # what was shown
        self.stopped = False
        self._sampling = sampling
        self._decoder = decoder_of(tokenizer, sampling)
        self._num_unchecked = sampling.min_tokens if sampling.stop else 0
        self._held = ""  # follows self.text, not shown yet
        self._unchecked_len = 0  # characters of self._held in which no stop string may end

    def add(self, token_ids: Sequence[int], finish: FinishReason | None = None) -> str:
        """Take new tokens; gives the text that can be shown since. `finish` holds nothing back."""
        if self.stopped:
            return ""
        tokens = self._visible(token_ids, finish)
        if self._num_unchecked:
            early, tokens = tokens[: self._num_unchecked], tokens[self._num_unchecked :]
            self._num_unchecked -= len(early)
            self._held += self._decoder.add(early)
            self._unchecked_len = len(self._held)
        self._held += self._decoder.add(tokens, final=finish is not None)
        return self._show(self._shown_end(finish is not None))

    def _visible(self, token_ids: Sequence[int], finish: FinishReason | None) -> Sequence[int]:
        """A token that ended the text is no part of it, special or not."""
        if finish is None or finish.kind != "stop" or self._sampling.include_stop_str_in_output:
            return token_ids
        by_token = bool(token_ids) and finish.matched == token_ids[-1]
        return token_ids[:-1] if by_token else token_ids

    def _shown_end(self, is_last: bool) -> int:
        stops = self._sampling.stop
        if not stops:
            return len(self._held)
        match = find_stop(self._held, stops, self._unchecked_len + 1)
        if match is not None:
            self.stopped = True
            return match.end if self._sampling.include_stop_str_in_output else match.start
        return len(self._held) - (0 if is_last else held_back(self._held, stops))

    def _show(self, end: int) -> str:
        delta, self._held = self._held[:end], self._held[end:]
        self._unchecked_len = max(0, self._unchecked_len - end)
        self.text += delta
        return delta
