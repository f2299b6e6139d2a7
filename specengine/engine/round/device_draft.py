"""Drafts of a model on the device."""

from __future__ import annotations

from torch import Tensor

from specengine.core.drafter import Drafter
from specengine.core.interfaces import RowsOutput
from specengine.core.request import Req
from specengine.core.rows import RowBatch
from specengine.core.spec import DraftProposal
from specengine.engine.round.key import InFlightRound, RoundKey, RoundPlan
from specengine.engine.round.source import DraftOptions, Drafts, Source


class DeviceDraft(Source):
    """A drafter whose rounds run on the device as a whole. Of no steps, it is plain decoding."""

    host_drafts = False

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.is_tree = self.model_is_tree = drafter.proposes_tree
        self.max_steps = self.model_steps = drafter.max_steps
        if drafter.proposes_tree:
            self.draft_slots, self.tree_topk = drafter.draft_slots, drafter.topk
        self.emits_probs = drafter.emits_probs
        self.may_be_unready = drafter.may_be_unready

    def is_ready(self, req: Req) -> bool:
        return self.drafter.is_ready(req)

    def mark_stale(self, rows: Tensor, lens: Tensor) -> None:
        self.drafter.mark_stale(rows, lens)

    def draft(self, key: RoundKey, rows: RowBatch, options: DraftOptions) -> Drafts:
        steps = key.num_steps
        if not self.is_tree or not steps:
            drafts_BK = self.drafter.draft_rows(rows, steps, options.picks)
            return Drafts(rows, drafts_BK, None, options.weights)
        tree = self.drafter.draft_tree_rows(
            rows, steps, options.edits, key.num_nodes, options.limits, options.draws
        )
        return Drafts.of_tree(rows, tree, options.weights)

    def observe(
        self, key: RoundKey, rows: RowBatch, output: RowsOutput, tokens: Tensor, accepted: Tensor
    ) -> None:
        self.drafter.observe_rows(rows, output, tokens, accepted)

    def num_nodes(self, num_steps: int) -> int:
        if not self.is_tree or not num_steps:
            return 1 + num_steps
        return self.drafter.num_tree_nodes(num_steps)

    def model_depth(self, key: RoundKey) -> int:
        return key.num_steps

    def counts_are_sent(self, key: RoundKey) -> bool:
        return False

    def send(self, proposal: DraftProposal, levels: list[int]) -> RoundPlan:
        raise NotImplementedError("the host drafts nothing")

    def num_drafted(self, in_flight: InFlightRound, levels: list[int]) -> list[int]:
        most = in_flight.key.num_nodes or self.num_nodes(self.max_steps)
        return [min(self.num_nodes(level), most) - 1 for level in levels]
