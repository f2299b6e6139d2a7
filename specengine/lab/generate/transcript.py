"""Conversations as documents."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specengine.draft.train.data.dataset import Document


class Transcript:
    """Prompts as the server feeds them, each with its answer.

    A prompt that goes on from the one before, token by token, lengthens its document. Where the
    answer was tokenized otherwise when it came back as text, the document before stands by itself
    and another one begins, in which only the new answer is learned: every document is what the
    server would feed.
    """

    def __init__(self) -> None:
        self._tokens: list[list[int]] = []
        self._loss: list[list[int]] = []

    def add(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> None:
        loss = [0] * len(prompt_ids)
        if self._tokens and list(prompt_ids[: len(self._tokens[-1])]) == self._tokens[-1]:
            before = self._loss.pop()
            loss[: len(before)] = before
            self._tokens.pop()
        self._tokens.append([*prompt_ids, *answer_ids])
        self._loss.append([*loss, *[1] * len(answer_ids)])

    def documents(self) -> list[Document]:
        return [
            Document(np.array(tokens, dtype=np.uint32), np.array(loss, dtype=np.uint8))
            for tokens, loss in zip(self._tokens, self._loss, strict=True)
        ]
