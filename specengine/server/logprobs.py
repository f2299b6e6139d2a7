"""Log-probabilities as the two completion endpoints write them."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from specengine.core.request import FinishReason, TokenLogprob
from specengine.engine.tokens import Vocabulary

# JSON has no infinity: what a token of probability zero gets.
LOWEST = -9999.0


def shown(entries: Sequence[TokenLogprob], finish: FinishReason | None) -> Sequence[TokenLogprob]:
    """Without the token that ended the text: like EOS, it is no part of the content."""
    if finish is None or finish.kind != "stop" or not entries:
        return entries
    return entries[:-1] if entries[-1].token == finish.matched else entries


def chat_logprobs(entries: Sequence[TokenLogprob], vocabulary: Vocabulary) -> dict[str, Any]:
    """The `logprobs` of a chat choice."""
    content = [
        _chat_token(vocabulary, entry.token, entry.logprob)
        | {"top_logprobs": [_chat_token(vocabulary, *pair) for pair in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _chat_token(vocabulary: Vocabulary, token: int, logprob: float) -> dict[str, Any]:
    return {
        "token": vocabulary.text_of(token),
        "logprob": max(logprob, LOWEST),
        "bytes": list(vocabulary.bytes_of(token)),
    }


class TextLogprobs:
    """The `logprobs` of a text choice, chunk after chunk: offsets run on."""

    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool) -> None:
        self._vocabulary = vocabulary
        self._skipped = vocabulary.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def take(self, tokens: Sequence[int], entries: Sequence[TokenLogprob | None]) -> dict[str, Any]:
        """None stands for a first token, which nothing predicted."""
        text_of = self._vocabulary.text_of
        tops = [None if entry is None else self._top(entry) for entry in entries]
        return {
            "tokens": [text_of(token) for token in tokens],
            "token_logprobs": [None if e is None else max(e.logprob, LOWEST) for e in entries],
            "top_logprobs": tops,
            "text_offset": [self._place(token) for token in tokens],
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """The best tokens, and the one that stands here if it is none of them."""
        pairs = [(entry.token, entry.logprob), *entry.top]
        return {self._vocabulary.text_of(t): max(logprob, LOWEST) for t, logprob in pairs}

    def _place(self, token: int) -> int:
        place = self._offset
        if token not in self._skipped:
            self._offset += len(self._utf8.decode(self._vocabulary.bytes_of(token)))
        return place
