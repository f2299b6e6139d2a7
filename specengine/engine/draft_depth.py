"""Drafts no deeper than each request allows (SpecControl), whatever the drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from specengine.core.batch import ScheduleBatch
from specengine.core.drafter import Drafter
from specengine.core.request import Req
from specengine.core.spec import DraftProposal
from specengine.draft.empty import EmptyDrafter
from specengine.engine.draft_nodes import best_nodes, keep_nodes


@dataclass(eq=False)
class NodeLimit:
    """The most nodes, root included, that a request can use in this round."""

    of_request: Callable[[Req], int]
    most: int | None = None  # of any request

    def __call__(self, req: Req) -> int:
        limit = self.of_request(req)
        return limit if self.most is None else min(limit, self.most)


def depths_within(reqs: Sequence[Req], most: int) -> list[int]:
    """Levels that each request lets be drafted for it."""
    if not most:
        return [0] * len(reqs)
    limits = [req.sampling.speculative.max_depth for req in reqs]
    return [most if limit is None or limit > most else limit for limit in limits]


def depth_limits(reqs: Sequence[Req], most: int | None) -> list[int | None]:
    """The most levels of each request, and of all; None is as many as there are."""
    limits = [req.sampling.speculative.max_depth for req in reqs]
    if most is None:
        return limits
    return [most if limit is None else min(limit, most) for limit in limits]


def draft_within_limits(
    drafter: Drafter, batch: ScheduleBatch, most: int | None = None, most_nodes: int | None = None
) -> DraftProposal:
    """What the drafter proposes, cut to the depth that each request allows, and to `most` levels;
    of that the `most_nodes` best nodes, root included, where the drafter knows which they are.
    Where no request wants a draft, the drafter is not called.

    The cut depends on the parameters of the requests and on earlier rounds, not on what was
    drafted: it biases no sampled draft.
    """
    limits = depth_limits(batch.reqs, most)
    if all(limit == 0 for limit in limits):
        return EmptyDrafter().draft(batch)
    proposal = cut_to_depth(drafter.draft(batch), limits)
    return proposal if most_nodes is None else best_nodes(proposal, most_nodes)


def cut_to_depth(proposal: DraftProposal, limits: Sequence[int | None]) -> DraftProposal:
    """limits: the most levels below the root of each request; None is as many as there are. What is
    left is ranked anew: its first n nodes are the best n so deep."""
    if all(limit is None for limit in limits):
        return proposal
    pairs = list(zip(proposal.num_nodes, limits, strict=True))
    if proposal.is_chain:
        counts = [count if limit is None else min(count, 1 + limit) for count, limit in pairs]
        return replace(proposal, num_nodes=counts, ranks=_ranks_of(proposal, counts))
    parents = proposal.parents.tolist()
    kept = [
        list(range(count)) if limit is None else _down_to(limit, row[:count])
        for row, (count, limit) in zip(parents, pairs, strict=True)
    ]
    ranks = _ranks_of(proposal, [len(nodes) for nodes in kept])
    return replace(keep_nodes(proposal, kept, parents), ranks=ranks)


def _ranks_of(proposal: DraftProposal, counts: list[int]) -> list[range] | None:
    return None if proposal.ranks is None else [range(count) for count in counts]


def _down_to(limit: int, parents: list[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if depths else 0)
    return [node for node, depth in enumerate(depths) if depth <= limit]
