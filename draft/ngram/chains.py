"""Chains of a whole batch, each from its request's own text, looked up in one call."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specengine.core.request import Req
from specengine.core.spec import DraftProposal
from specengine.draft.reading import read_anew, unread
from specengine.kernels.native import lookup


class ChainText:
    """Prompt and output of one request, as RequestText; in C, where Python would take five times as
    long for hundreds of requests. Drafts are the same, but where a context occurred so often that
    only the latest of its occurrences are compared."""

    __slots__ = ("_req", "text")

    def __init__(self, req: Req, min_match: int, max_match: int) -> None:
        self._req = req
        self.text = lookup.LookupText(min_match, max_match)

    @property
    def num_tokens(self) -> int:
        return self.text.num_tokens

    def unread(self, most: int | None = None) -> list[int]:
        return unread(self._req, self.text.num_tokens, most)

    def update(self, most: int | None = None) -> None:
        """Take in the tokens that came since, the prompt's at first; at most so many."""
        lookup.extend([self.text], [self.unread(most)])


def draft_chains(
    requests: Sequence[ChainText],
    max_nodes: Sequence[int],
    said: Sequence[list[int]] | None = None,
) -> DraftProposal:
    """max_nodes: of each, root included. said: tokens of each that are not committed yet."""
    texts = [one.text for one in requests]
    lookup.extend(texts, read_anew(requests, said))
    tokens, num_nodes = lookup.draft(texts, [max(most - 1, 0) for most in max_nodes])
    width = max(num_nodes)
    parents = torch.arange(-1, width - 1).expand(len(texts), -1)
    return DraftProposal(tokens[:, :width], parents, num_nodes, is_chain=True)
