"""What a drafter of text has read of a request, and what it has not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from specengine.core.request import Req
from specengine.kernels.native.texts import NativeText, extend

T = TypeVar("T", bound=NativeText)


def unread(req: Req, known: int, most: int | None = None) -> list[int]:
    """Tokens of prompt and output, from the known-th on; at most so many, and in time that the rest
    of a long prompt does not lengthen."""
    before = len(req.prompt_ids)
    if known >= before:
        return req.output_ids[known - before : None if most is None else known - before + most]
    end = req.seq_len if most is None else known + most
    return req.prompt_ids[known:end] + req.output_ids[: max(end - before, 0)]


class NativeReading(Generic[T]):
    """Prompt and output of one request, in a text that C keeps."""

    __slots__ = ("req", "text")

    def __init__(self, req: Req, text: T) -> None:
        self.req = req
        self.text = text

    @property
    def num_tokens(self) -> int:
        return self.text.num_tokens

    def unread(self, most: int | None = None) -> list[int]:
        return unread(self.req, self.text.num_tokens, most)

    def update(self, most: int | None = None) -> None:
        """Take in the tokens that came since, the prompt's at first; at most so many."""
        if new := self.unread(most):
            extend([self.text], [new])


def read_all(
    readings: Sequence[NativeReading[Any]], said: Sequence[list[int]] | None = None
) -> None:
    """Each takes in what was committed since, and what its request has `said` that is not committed
    yet. Raises MemoryError."""
    new = [unread(one.req, one.text.num_tokens) for one in readings]
    if said is not None:
        new = [old + more for old, more in zip(new, said, strict=True)]
    extend([one.text for one in readings], new)
