"""Chains of a whole batch, each from its request's own text, looked up in one call."""

from __future__ import annotations

from collections.abc import Sequence

from specengine.core.request import Req
from specengine.core.spec import DraftProposal
from specengine.draft.chain import chain_proposal
from specengine.draft.reading import NativeReading, read_all
from specengine.kernels.native import lookup


class ChainText(NativeReading[lookup.LookupText]):
    """Prompt and output of one request, as RequestText; in C, where Python would take five times as
    long for hundreds of requests. Drafts are the same, but where a context occurred so often that
    only the latest of its occurrences are compared."""

    __slots__ = ()

    def __init__(self, req: Req, min_match: int, max_match: int) -> None:
        super().__init__(req, lookup.LookupText(min_match, max_match))


def draft_chains(
    requests: Sequence[ChainText],
    max_nodes: Sequence[int],
    said: Sequence[list[int]] | None = None,
) -> DraftProposal:
    """max_nodes: of each, root included. said: tokens of each that are not committed yet."""
    read_all(requests, said)
    most = [max(one - 1, 0) for one in max_nodes]
    tokens, num_nodes = lookup.draft([one.text for one in requests], most)
    return chain_proposal(tokens[:, : max(num_nodes)], num_nodes, [])
