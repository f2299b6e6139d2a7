"""The drafter behind decoding without speculation."""

from __future__ import annotations

import torch

from specengine.core.batch import ScheduleBatch
from specengine.core.drafter import Drafter
from specengine.core.spec import DraftProposal


class EmptyDrafter(Drafter):
    """Proposes the root alone, so that a round is a plain decode."""

    drafts_on = "device"
    can_be_hybrid = False

    def draft(self, batch: ScheduleBatch) -> DraftProposal:
        tokens = torch.tensor([[req.last_token] for req in batch.reqs], dtype=torch.int64)
        parents = torch.full_like(tokens, -1)
        return DraftProposal(tokens, parents, [1] * batch.batch_size, is_chain=True)
