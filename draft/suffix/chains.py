"""Chains of a whole batch, each from its request's own text, drafted in one call."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specengine.core.request import Req
from specengine.core.spec import DraftProposal
from specengine.draft.proposals import Draft
from specengine.draft.reading import read_anew, unread
from specengine.kernels.native import suffix
from specengine.kernels.native.suffix import ChainRules


class ChainText:
    """Prompt and output of one request, as a RequestText without a corpus; in C, where Python would
    take several times as long for hundreds of requests. Drafts are the same."""

    __slots__ = ("_req", "_rules", "text")

    def __init__(self, req: Req, max_depth: int, rules: ChainRules) -> None:
        self._req = req
        self._rules = rules
        self.text = suffix.SuffixText(max_depth)

    @property
    def num_tokens(self) -> int:
        return self.text.num_tokens

    @property
    def match_length(self) -> int:
        """Of the longest suffix seen before, in tokens."""
        return self.text.match_length

    def unread(self, most: int | None = None) -> list[int]:
        return unread(self._req, self.text.num_tokens, most)

    def update(self, most: int | None = None) -> None:
        """Take in the tokens that came since, the prompt's at first; at most so many."""
        if new := self.unread(most):
            suffix.extend([self.text], [new])

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
    texts = [one.text for one in requests]
    suffix.extend(texts, read_anew(requests, said))
    most = [one - 1 for one in max_nodes]
    tokens, confidence, num_nodes = suffix.draft(texts, most, rules)
    width = max(num_nodes)
    if width < tokens.shape[1]:
        tokens, confidence = tokens[:, :width], confidence[:, :width]
    return DraftProposal(
        tokens=tokens,
        parents=torch.arange(-1, width - 1).expand(len(texts), -1),
        num_nodes=num_nodes,
        is_chain=True,
        confidence=confidence,
        ranks=[range(count) for count in num_nodes],
    )
