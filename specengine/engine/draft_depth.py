"""Drafts no deeper than each request allows (SpecControl), whoever drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specengine.core.batch import ScheduleBatch
from specengine.core.spec import Drafter, DraftProposal
from specengine.draft.empty import EmptyDrafter
from specengine.engine.draft_nodes import keep_nodes


def draft_within_limits(drafter: Drafter, batch: ScheduleBatch) -> DraftProposal:
    """What the drafter proposes, cut to the depth that each request allows. Where nobody wants a
    draft, the drafter is not asked for one.

    The cut depends on the parameters of the requests alone, not on what was drafted: it biases no
    sampled draft.
    """
    limits = [req.sampling.speculative.max_depth for req in batch.reqs]
    if all(limit == 0 for limit in limits):
        return EmptyDrafter().draft(batch)
    return cut_to_depth(drafter.draft(batch), limits)


def cut_to_depth(proposal: DraftProposal, limits: Sequence[int | None]) -> DraftProposal:
    """limits: the most levels below the root of each request; None is as many as there are."""
    if all(limit is None for limit in limits):
        return proposal
    pairs = list(zip(proposal.num_nodes, limits, strict=True))
    if proposal.is_chain:
        counts = [count if limit is None else min(count, 1 + limit) for count, limit in pairs]
        return replace(proposal, num_nodes=counts)
    parents = proposal.parents.tolist()
    kept = [
        list(range(count)) if limit is None else _down_to(limit, row[:count])
        for row, (count, limit) in zip(parents, pairs, strict=True)
    ]
    return keep_nodes(proposal, kept, parents)


def _down_to(limit: int, parents: list[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if depths else 0)
    return [node for node, depth in enumerate(depths) if depth <= limit]
