"""Chains of a whole batch, each from its request's own text, drafted in one call."""

from __future__ import annotations

from collections.abc import Sequence

from specengine.core.request import Req
from specengine.core.spec import DraftProposal
from specengine.draft.chain import chain_proposal
from specengine.draft.proposals import Draft
from specengine.draft.reading import NativeReading, read_all
from specengine.kernels.native import suffix
from specengine.kernels.native.suffix import ChainRules


class ChainText(NativeReading[suffix.SuffixText]):
    """Prompt and output of one request, as a RequestText without a corpus; in C, where Python would
    take several times as long for hundreds of requests. Drafts are the same."""

    __slots__ = ("_rules",)

    def __init__(self, req: Req, max_depth: int, rules: ChainRules) -> None:
        super().__init__(req, suffix.SuffixText(max_depth))
        self._rules = rules

    @property
    def match_length(self) -> int:
        """The length of the longest suffix seen before, in tokens."""
        return self.text.match_length

    def draft(self, max_tokens: int) -> Draft:
        tokens, probs = self.text.draft(max_tokens, self._rules)
        return Draft(tokens, None, probs)


def draft_chains(
    requests: Sequence[ChainText],
    max_nodes: Sequence[int],
    rules: ChainRules,
    said: Sequence[list[int]] | None = None,
) -> DraftProposal:
    """All that the requests say is read before. max_nodes: of each, root included. said: tokens of
    each that are not committed yet."""
    read_all(requests, said)
    texts, most = [one.text for one in requests], [one - 1 for one in max_nodes]
    tokens, confidence, num_nodes = suffix.draft(texts, most, rules)
    width = max(num_nodes)
    proposal = chain_proposal(tokens[:, :width], num_nodes, [])
    proposal.confidence = confidence[:, :width]
    proposal.ranks = [range(count) for count in num_nodes]
    return proposal
