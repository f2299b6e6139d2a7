"""The conversations that every setting holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specengine.draft.train.data.prompts import Prompt
from specengine.engine.chat_template import has_chat_template, render_chat
from specengine.engine.tokens import encode_text
from specengine.lab.accept.prompts import PromptSet
from specengine.lab.accept.summary import PromptLabels

_ROOM = 16  # tokens a conversation, for what its template may add
_REREAD = 3  # tokens that one of an answer may become when it is read again: U+FFFD is three bytes

Replies = Mapping[tuple[int, int], str]  # by prompt and turn


@dataclass(frozen=True)
class Turn:
    """The turn-th question of a prompt, both counted from 0, and all that came before it."""

    prompt: int
    turn: int
    token_ids: list[int]


class Script:
    """The prompts of all sets, numbered one after another, as token ids: through the chat template,
    or, for a model without one, as plain text that the answers continue."""

    def __init__(self, sets: Sequence[PromptSet], tokenizer: Any) -> None:
        self.sets = sets
        self.tokenizer = tokenizer
        self.is_chat = has_chat_template(tokenizer)
        self.prompts: list[Prompt] = [prompt for one in sets for prompt in one.prompts]

    @property
    def num_turns(self) -> int:
        """Of the longest conversation."""
        return max(len(prompt.turns) for prompt in self.prompts)

    def turns(self, turn: int, replies: Replies) -> list[Turn]:
        """That turn of each conversation that has it, and whose earlier questions have replies."""
        return [
            Turn(index, turn, self._render(prompt, index, turn, replies))
            for index, prompt in enumerate(self.prompts)
            if turn < len(prompt.turns)
            and all((index, before) in replies for before in range(turn))
        ]

    def name_of(self, turn: Turn) -> str:
        prompt = self.prompts[turn.prompt]
        return f"prompt {prompt.id}, turn {turn.turn + 1}"

    def longest(self, max_new_tokens: int) -> int:
        """Tokens that the longest conversation can come to."""
        return max(self._bound(index, max_new_tokens) for index in range(len(self.prompts)))

    def labels(self) -> PromptLabels:
        names = [one.name for one in self.sets]
        set_of = np.repeat(np.arange(len(names)), [len(one.prompts) for one in self.sets])
        full = [
            _category(one.name, prompt.category or one.name)
            for one in self.sets
            for prompt in one.prompts
        ]
        categories = list(dict.fromkeys(full))
        category_of = np.array([categories.index(name) for name in full])
        return PromptLabels(set_of, category_of, names, categories)

    def _render(self, prompt: Prompt, index: int, turn: int, replies: Replies) -> list[int]:
        said = [replies[index, before] for before in range(turn)]
        if not self.is_chat:
            system = [prompt.system] if prompt.system else []
            pairs = zip(prompt.turns, said, strict=False)
            parts = [*system, *(text for pair in pairs for text in pair)]
            return encode_text(self.tokenizer, "\n\n".join([*parts, prompt.turns[turn]]))
        messages = [{"role": "system", "content": prompt.system}] if prompt.system else []
        messages.append({"role": "user", "content": prompt.turns[0]})
        for reply, question in zip(said, prompt.turns[1:], strict=False):
            messages.append({"role": "assistant", "content": reply})
            messages.append({"role": "user", "content": question})
        return render_chat(self.tokenizer, messages)

    def _bound(self, index: int, max_new_tokens: int) -> int:
        turns = len(self.prompts[index].turns)
        blank = {(index, before): "" for before in range(turns)}
        rendered = self._render(self.prompts[index], index, turns - 1, blank)
        return len(rendered) + (_REREAD * (turns - 1) + 1) * max_new_tokens + _ROOM


def _category(set_name: str, category: str) -> str:
    return set_name if category == set_name else f"{set_name}/{category}"
