"""What a drafter of text has not read yet."""

from __future__ import annotations

from specengine.core.request import Req


def unread(req: Req, known: int, most: int | None = None) -> list[int]:
    """Tokens of prompt and output, from the known-th on; at most so many."""
    skipped = known - len(req.prompt_ids)
    new = req.output_ids[skipped:] if skipped >= 0 else req.prompt_ids[known:] + req.output_ids
    return new if most is None else new[:most]
