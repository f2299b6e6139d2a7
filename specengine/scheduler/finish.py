"""Where the output of a request ends, inside a run of accepted tokens."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from specengine.core.request import FinishReason, Req

logger = logging.getLogger(__name__)


class TextDecoder(Protocol):
    """Turns the tokens of one request into text as they come."""

    def add(self, token_ids: Sequence[int]) -> str:
        """Whole characters; the bytes of an unfinished one wait for the next call."""
        ...


class StopStrings:
    """Looks for stop strings in the text of one request, which may begin inside one token and end
    inside another."""

    def __init__(self, stops: Sequence[str], decoder: TextDecoder) -> None:
        self._stops = tuple(stops)
        self._decoder = decoder
        self._tail_len = max(map(len, self._stops)) - 1
        self._tail = ""  # could hold the beginning of a stop string

    def add(self, token: int) -> str | None:
        """The stop string that this token completes: the one that ends first, the longest of those
        that end together."""
        text = self._tail + self._decoder.add([token])
        found: list[tuple[int, int, str]] = []
        for stop in self._stops:
            start = text.find(stop, max(0, len(self._tail) + 1 - len(stop)))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        self._tail = text[max(0, len(text) - self._tail_len) :]
        return min(found)[2] if found else None


# How many tokens are kept, the one that ends the request among them, and why it ends: None if it
# goes on. A plain tuple, since one is made for each request and round.
Cut = tuple[int, FinishReason | None]


def find_cut(req: Req, tokens: Sequence[int], context_len: int) -> Cut:
    """Which of the newly chosen `tokens` belong to the output; none of them is committed yet.

    EOS, stop tokens and stop strings among the first min_tokens tokens do not count. Stop strings
    and grammars see each token once: the caller commits what is kept.
    """
    num_output, count = len(req.output_ids), len(tokens)
    max_tokens = req.sampling.max_tokens
    if (  # at a glance: hundreds of requests are asked after each round
        req.stop_checker is None
        and req.grammar is None
        and (max_tokens is None or num_output + count < max_tokens)
        and len(req.prompt_ids) + num_output + count < context_len
        and req.end_ids.isdisjoint(tokens)
    ):
        return count, None
    for index, token in enumerate(tokens, 1):
        reason = _reason_to_stop(req, token, num_output + index, context_len)
        if reason is not None:
            return index, reason
    return count, None


def _reason_to_stop(req: Req, token: int, num_output: int, context_len: int) -> FinishReason | None:
    sampling = req.sampling
    text = req.stop_checker.add(token) if req.stop_checker is not None else None
    grammar = req.grammar
    if grammar is not None and not grammar.accept(token):
        logger.debug("a grammar cannot go on: %s", grammar.error)
        message = (
            f"the grammar cannot go on after {num_output} tokens: it is too complex; simplify it, "
            "with fewer alternatives and shorter repetitions"
        )
        return FinishReason("error", message=message)
    if num_output > sampling.min_tokens:
        is_eos = token in req.eos_ids and not sampling.ignore_eos
        if is_eos or token in sampling.stop_token_ids:
            return FinishReason("stop", token)
        if text is not None:
            return FinishReason("stop", text)
    if grammar is not None and grammar.is_complete:
        return FinishReason("stop", token if token in req.eos_ids else None)
    if sampling.max_tokens is not None and num_output >= sampling.max_tokens:
        return FinishReason("length")
    if len(req.prompt_ids) + num_output >= context_len:
        return FinishReason("length")
    return None
