"""What a drafter of text has not read yet."""

from __future__ import annotations

from specengine.core.request import Req


def unread(req: Req, known: int, most: int | None = None) -> list[int]:
    """Tokens of prompt and output, from the known-th on; at most so many, and in time that the rest
    of a long prompt does not lengthen."""
    end = req.seq_len if most is None else known + most
    before = len(req.prompt_ids)
    if known >= before:
        return req.output_ids[known - before : end - before]
    return req.prompt_ids[known:end] + req.output_ids[: max(end - before, 0)]
