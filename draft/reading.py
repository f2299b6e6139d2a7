"""What a drafter of text has not read yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specengine.core.request import Req


class Reader(Protocol):
    """The text of a request, as far as it was read."""

    def unread(self) -> list[int]:
        """What was committed since."""
        ...


def unread(req: Req, known: int, most: int | None = None) -> list[int]:
    """Tokens of prompt and output, from the known-th on; at most so many, and in time that the rest
    of a long prompt does not lengthen."""
    before = len(req.prompt_ids)
    if known >= before:
        return req.output_ids[known - before : None if most is None else known - before + most]
    end = req.seq_len if most is None else known + most
    return req.prompt_ids[known:end] + req.output_ids[: max(end - before, 0)]


def read_anew(readers: Sequence[Reader], said: Sequence[list[int]] | None) -> list[list[int]]:
    """Of each what was committed since, and what it has said that is not committed yet."""
    if said is None:
        return [one.unread() for one in readers]
    return [one.unread() + new for one, new in zip(readers, said, strict=True)]
