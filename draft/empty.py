"""The drafter behind decoding without speculation."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.core.batch import RowBatch, ScheduleBatch
from specengine.core.draft_choosing import DraftPicks
from specengine.core.interfaces import LogitsOutput, RowsOutput
from specengine.core.request import Req
from specengine.core.spec import DraftProposal, PrefillResult, VerifyResult


class EmptyDrafter:
    """Proposes the root alone, so that a round is a plain decode."""

    needs_hidden = False
    writes_kv = False
    proposes_tree = False
    emits_probs = False
    max_nodes = 1

    def seed(self, batch: ScheduleBatch, output: LogitsOutput, result: PrefillResult) -> None:
        """There is no state to set up."""

    def draft(self, batch: ScheduleBatch) -> DraftProposal:
        tokens = torch.tensor([[req.last_token] for req in batch.reqs], dtype=torch.int64)
        parents = torch.full_like(tokens, -1)
        return DraftProposal(tokens, parents, [1] * batch.batch_size, is_chain=True)

    def observe(self, batch: ScheduleBatch, output: LogitsOutput, result: VerifyResult) -> None:
        """There is nothing to learn."""

    @property
    def row_steps(self) -> int:
        return 0

    def draft_rows(self, rows: RowBatch, num_steps: int, picks: DraftPicks | None = None) -> Tensor:
        assert num_steps == 0
        return rows.roots_B.new_empty(len(rows.roots_B), 0)

    def observe_rows(
        self, rows: RowBatch, output: RowsOutput, tokens_BN: Tensor, accepted_B: Tensor
    ) -> None:
        """There is nothing to learn."""

    def release(self, req: Req) -> None:
        """There is nothing to forget."""
