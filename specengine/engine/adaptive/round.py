"""Rounds of the shape that AdaptiveSteps says."""

from __future__ import annotations

from time import perf_counter

from specengine.core.batch import ScheduleBatch
from specengine.core.spec import VerifyResult
from specengine.engine.adaptive.steps import AdaptiveSteps
from specengine.engine.draft_depth import NodeLimit, depth_within
from specengine.engine.round.host import HostRound


class AdaptiveRound:
    """Runs rounds eagerly, times them, and learns from each before the next.

    limit: what the drafter asks for the nodes of a request; where it drafts chains, it is told of
    the depth beforehand, and saves the work. Trees are cut when they are drafted.
    """

    def __init__(self, steps: AdaptiveSteps, limit: NodeLimit, is_chain: bool) -> None:
        self.steps = steps
        self.limit = limit
        self.is_chain = is_chain

    def run(self, inner: HostRound, batch: ScheduleBatch) -> VerifyResult:
        choice = self.steps.choose(batch.batch_size)
        depth = choice.num_steps
        self.limit.most = depth + 1 if self.is_chain else None
        start = perf_counter()
        try:
            result = inner.run(batch, depth, choice.num_nodes)
        finally:
            self.limit.most = None
        seconds = perf_counter() - start
        result.depth = choice
        self.steps.observe(
            batch.batch_size,
            depth,
            result.num_drafted,
            result.num_accepted,
            seconds,
            choice.num_nodes,
            result.path_ranks,
            limits=[depth_within(req, depth) for req in batch.reqs],
            drafting=inner.drafting,
            of_text=inner.from_lookup,
        )
        return result
