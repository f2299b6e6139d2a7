"""Rounds that the host runs, at the depth that DepthChooser chooses."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from specengine.core.batch import ScheduleBatch
from specengine.core.parallel import Link, NoLink
from specengine.core.spec import VerifyResult
from specengine.engine.adaptive.acceptance import RoundObservation
from specengine.engine.adaptive.agree import agreed
from specengine.engine.adaptive.state import DepthChooser
from specengine.engine.draft_depth import NodeLimit, depths_within
from specengine.engine.round.host import HostRound


class AdaptiveRound:
    """Runs rounds on the host, times them, and learns from each before the next.

    limit: from which the drafter reads the most nodes of a request. A drafter of chains gets the
    depth from it before it drafts, which saves work; trees are cut after drafting. link: to other
    ranks, where rank 0 chooses.
    """

    def __init__(
        self, chooser: DepthChooser, limit: NodeLimit, is_chain: bool, link: Link | None
    ) -> None:
        self.chooser = chooser
        self.limit = limit
        self.is_chain = is_chain
        self.link = link or NoLink()
        self.is_disturbed: Callable[[], bool] = lambda: False  # by prompts that run beside rounds

    def run(self, inner: HostRound, batch: ScheduleBatch) -> VerifyResult:
        choice, _ = agreed(self.link, lambda: (self.chooser.choose(batch.batch_size), False))
        depth = choice.num_steps
        self.limit.most = depth + 1 if self.is_chain else None
        start = perf_counter()
        try:
            result = inner.run(batch, depth, choice.num_nodes)
        finally:
            self.limit.most = None
        seconds = perf_counter() - start
        result.depth = choice
        observation = RoundObservation(
            batch_size=batch.batch_size,
            num_steps=depth,
            num_drafted=result.num_drafted,
            num_accepted=result.num_accepted,
            num_nodes=choice.num_nodes,
            path_ranks=result.path_ranks,
            limits=depths_within(batch.reqs, depth),
            from_lookup=inner.from_lookup,
            seconds=None if self.is_disturbed() else seconds,
            drafting_seconds=inner.drafting,
        )
        self.chooser.observe(observation)
        return result
