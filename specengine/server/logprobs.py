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
    """Those of a chat: without the token that ended the text, which is no part of the content."""
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


def prompt_logprobs(
    entries: Sequence[TokenLogprob | None], vocabulary: Vocabulary, most: int
) -> list[dict[str, Any] | None]:
    """By token id, the token at each place and the `most` best ones: vLLM's form. A
    token's rank is known among these alone. None where nothing predicted the token."""
    return [None if one is None else _at_place(one, vocabulary, most) for one in entries]


def _at_place(entry: TokenLogprob, vocabulary: Vocabulary, most: int) -> dict[str, Any]:
    ranked: list[tuple[tuple[int, float], int | None]] = [
        (pair, rank) for rank, pair in enumerate(entry.top[:most], 1)
    ]
    if entry.token not in {token for (token, _), _ in ranked}:
        ranked.insert(0, ((entry.token, entry.logprob), rank_of(entry)))
    return {
        str(token): {
            "logprob": max(logprob, LOWEST),
            "rank": rank,
            "decoded_token": vocabulary.text_of(token),
        }
        for (token, logprob), rank in ranked
    }


def rank_of(entry: TokenLogprob) -> int | None:
    """1 is the best token; None where it is none of those that were asked for."""
    ranks = (rank for rank, (token, _) in enumerate(entry.top, 1) if token == entry.token)
    return next(ranks, None)


def name_of(vocabulary: Vocabulary, token: int) -> str:
    """Its text; as OpenAI does, its bytes where it is no whole character: names tell tokens
    apart."""
    piece = vocabulary.bytes_of(token)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


class TextLogprobs:
    """The `logprobs` of a text choice, chunk after chunk: offsets run on. Token j of a choice is
    entry j, the one that ended the text included, so that clients may cut the lists by tokens."""

    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool, most: int) -> None:
        """most: alternatives of a place."""
        self._vocabulary = vocabulary
        self._most = most
        self._skipped = vocabulary.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def take(self, tokens: Sequence[int], entries: Sequence[TokenLogprob | None]) -> dict[str, Any]:
        """The entry of a first token is None: nothing predicted it."""
        tops = [None if entry is None else self._top(entry) for entry in entries]
        return {
            "tokens": [name_of(self._vocabulary, token) for token in tokens],
            "token_logprobs": [None if e is None else max(e.logprob, LOWEST) for e in entries],
            "top_logprobs": tops,
            "text_offset": [self._place(token) for token in tokens],
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """The best tokens, and the chosen one if it is none of them."""
        found: dict[str, float] = {}
        for token, logprob in [(entry.token, entry.logprob), *entry.top[: self._most]]:
            # Two tokens of one name: the first is the better one, or the chosen one.
            found.setdefault(name_of(self._vocabulary, token), max(logprob, LOWEST))
        return found

    def _place(self, token: int) -> int:
        place = self._offset
        if token not in self._skipped:
            self._offset += len(self._utf8.decode(self._vocabulary.bytes_of(token)))
        return place
