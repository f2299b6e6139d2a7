"""The serving chat template, for answers and for user turns that the target writes itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specengine.core.errors import DataError
from specengine.core.request import FinishReason
from specengine.core.sampling import SamplingParams
from specengine.engine.chat_template import chat_text, render_chat
from specengine.engine.detokenizer import Detokenizer
from specengine.engine.tokens import encode_text, vocabulary_of

Message = dict[str, str]

# Take the place of the words of turns while the template around them is looked for.
_MARK, _ANSWER = "\u2063user turn\u2063", "\u2063answer\u2063"


@dataclass(frozen=True)
class TurnEnd:
    """What ends a user turn in this template: a special token, or a text."""

    token_ids: tuple[int, ...]
    texts: tuple[str, ...]


class ChatFormat:
    """Token ids of conversations, exactly as the server feeds them. Raises RequestError for a model
    without a chat template, and DataError for one whose template does not show user turns."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._special = [str(token) for token in tokenizer.get_added_vocab() if str(token).strip()]
        self._first: dict[str, list[int]] = {}  # prompts by opening
        self.turn_end = self._find_turn_end()
        self._between_turns = self._find_between_turns()

    def answer_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Up to where the assistant's next words begin."""
        return render_chat(self.tokenizer, messages)

    def first_user_prompt(self, opening: str) -> list[int]:
        """Up to where the user's first words go on, which begin with `opening`."""
        if opening not in self._first:
            self._first[opening] = self._encode(self._around_user([])[0] + opening)
        return self._first[opening]

    def next_user_prompt(self, prompt_ids: list[int], answer_ids: list[int]) -> list[int]:
        """Up to where the user's next words begin, after a whole answer."""
        between = self._between_turns
        has_end = between[:1] == answer_ids[-1:]  # the token that ended the answer
        return [*prompt_ids, *answer_ids, *(between[1:] if has_end else between)]

    def text_of(
        self, token_ids: Sequence[int], sampling: SamplingParams, finish: FinishReason
    ) -> str:
        """What a client is shown of a reply."""
        return Detokenizer(self.tokenizer, sampling).add(token_ids, finish)

    def has_special(self, text: str) -> bool:
        """Whether rendering `text` would make special tokens of its words."""
        return any(token in text for token in self._special)

    def _find_turn_end(self) -> TurnEnd:
        _, tail = self._around_user([])
        first = self._encode(tail)[:1]
        if first and first[0] in vocabulary_of(self.tokenizer).special_ids:
            return TurnEnd(tuple(first), ())
        return TurnEnd((), (tail.strip() or tail,) if tail else ())

    def _find_between_turns(self) -> list[int]:
        """From the end of an answer to the user's next words."""
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
        return self._encode(self._around_user(turns)[0].rpartition(_ANSWER)[2])

    def _around_user(self, messages: Sequence[Message]) -> tuple[str, str]:
        """The text before and after the words of the user's next turn."""
        asked = [*messages, {"role": "user", "content": _MARK}]
        text = chat_text(self.tokenizer, asked, add_generation_prompt=False)
        head, mark, tail = text.partition(_MARK)
        if not mark or _MARK in tail:
            raise DataError(
                "the chat template does not write the user's words once and unchanged, so the "
                "target cannot write user turns; give --prompts, or another --chat-template"
            )
        return head, tail

    def _encode(self, text: str) -> list[int]:
        return encode_text(self.tokenizer, text, add_special_tokens=False)
