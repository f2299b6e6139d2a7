"""Drafts that come from the host into rounds that run on the device."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from specengine.core.batch import RowBatch
from specengine.core.draft_choosing import DraftPicks
from specengine.core.interfaces import RowsOutput
from specengine.core.spec import DraftProposal
from specengine.core.transfer import pinned
from specengine.engine.round_form import Wish


class HostDrafter(ABC):
    """A core.spec.RowDrafter whose drafts are `set` before each round that has any."""

    row_steps: int | None

    @abstractmethod
    def set(self, proposal: DraftProposal) -> Wish:
        """Drafts on the host, in the order of the round's requests -> what that round is to be."""

    def set_beside(self, proposal: DraftProposal, levels: list[int]) -> Wish:
        """As `set`. levels: how deep each request may draft, of whom somebody else drafts where the
        host did not."""
        return self.set(proposal)

    @abstractmethod
    def draft_rows(self, rows: RowBatch, num_steps: int, picks: DraftPicks | None = None) -> Tensor:
        """Text says nothing of what requests change of logits, nor is it drawn."""

    def observe_rows(  # noqa: B027 (there is nothing to do)
        self, rows: RowBatch, output: RowsOutput, tokens_BN: Tensor, accepted_B: Tensor
    ) -> None:
        """The host learns from the text."""


class HostDrafts(HostDrafter):
    """Chains. Shorter ones are padded with token 0, or with what lies there: where rounds are
    matched, it stands if the target chooses it."""

    def __init__(self, batch_size: int, num_steps: int, device: torch.device) -> None:
        self.row_steps = num_steps
        self.tokens = torch.zeros(batch_size, num_steps, dtype=torch.int64, device=device)

    def set(self, proposal: DraftProposal) -> Wish:
        drafts_BK = proposal.tokens[:, 1:]
        size, steps = drafts_BK.shape
        if steps:
            moved = pinned(drafts_BK, self.tokens.device)
            self.tokens[:size, :steps].copy_(moved, non_blocking=True)
        return Wish(proposal.num_drafted)

    def draft_rows(self, rows: RowBatch, num_steps: int, picks: DraftPicks | None = None) -> Tensor:
        return self.tokens[: len(rows.rows_B), :num_steps]
