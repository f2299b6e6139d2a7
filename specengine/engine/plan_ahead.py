"""Prepares verifications before their drafts are made: how long they are is known by then."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch

from specengine.core.batch import ModelWorkerBatch, ScheduleBatch
from specengine.core.config import EngineConfig
from specengine.core.drafter import Drafter
from specengine.core.forward_mode import ForwardMode
from specengine.core.interfaces import LogitsOutput
from specengine.core.tree import Tree
from specengine.engine.draft_depth import depth_limits
from specengine.runner.model_runner import ModelRunner
from specengine.runner.plan_stream import EagerAhead, GraphAhead, PlanStream

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlannedVerify:
    """A verification on its way, for drafts of a certain shape."""

    ahead: EagerAhead | GraphAhead
    batch: ModelWorkerBatch  # what was prepared

    def fits(self, batch: ModelWorkerBatch) -> bool:
        mine, tree = self.batch.tree, batch.tree
        if (batch.forward_mode, batch.extend_lens) != (
            self.batch.forward_mode,
            self.batch.extend_lens,
        ):
            return False
        if tree is None or mine is None:
            return tree is mine
        return tree.mask_BNN.shape == mine.mask_BNN.shape

    def run(self, batch: ModelWorkerBatch) -> LogitsOutput | None:
        """None where the drafts have another shape than was predicted."""
        if self.fits(batch):
            return self.ahead.run(batch)
        self.ahead.drop()
        return None


class PlanAhead:
    """Predicts the shape of a round's drafts, and has the verification prepared for it."""

    def __init__(self, stream: PlanStream, drafter: Drafter) -> None:
        self.stream = stream
        self.drafter = drafter

    def begin(self, batch: ScheduleBatch, most_levels: int | None) -> PlannedVerify | None:
        """most_levels: how deep drafts may go. None where the shape depends on what is drafted, and
        where nothing is drafted at all."""
        counts = self._predict_shape(batch, most_levels)
        if counts is None or max(counts) == 1:
            return None
        tree = None
        if self.drafter.proposes_tree:
            device, shape = self.stream.runner.device, (len(counts), max(counts), max(counts))
            mask = torch.zeros(shape, dtype=torch.bool, device=device)
            tree = Tree(torch.zeros(sum(counts), dtype=torch.int64), mask)
        placeholder = replace(
            batch.get_model_worker_batch(),
            forward_mode=ForwardMode.TARGET_VERIFY,
            input_ids=torch.zeros(sum(counts), dtype=torch.int64),
            extend_lens=counts,
            tree=tree,
        )
        ahead = self.stream.begin(placeholder)
        return None if ahead is None else PlannedVerify(ahead, placeholder)

    def _predict_shape(self, batch: ScheduleBatch, most_levels: int | None) -> list[int] | None:
        if any(req.grammar is not None for req in batch.reqs):
            return None
        counts = self.drafter.predict_shape(batch)
        limits = depth_limits(batch.reqs, most_levels)
        if counts is None or all(limit is None for limit in limits):
            return counts
        if self.drafter.proposes_tree:
            return None
        return [
            count if limit is None else min(count, 1 + limit)
            for count, limit in zip(counts, limits, strict=True)
        ]


def make_plan_ahead(
    config: EngineConfig, runner: ModelRunner, drafter: Drafter
) -> PlanAhead | None:
    """Where it is asked for, and there is something to prepare."""
    if not config.schedule.enable_plan_stream:
        return None
    if not runner.attn_backend.limits.plans_on_host:
        name = runner.attn_backend.name
        logger.info("no plan stream: the attention backend %s plans on the device", name)
        return None
    if not drafter.predicts_shape:
        logger.info("no plan stream: how many tokens are drafted is known afterwards")
        return None
    return PlanAhead(PlanStream(runner), drafter)
