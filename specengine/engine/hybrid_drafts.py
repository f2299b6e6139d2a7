"""A model's drafts on the device, and in place of some of them what the host found in text."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
import torch
from torch import Tensor

from specengine.core.batch import RowBatch
from specengine.core.draft_choosing import DraftPicks
from specengine.core.interfaces import RowsOutput
from specengine.core.others_drafts import LateRowDrafter
from specengine.core.request import Req
from specengine.core.spec import DraftProposal, RowDrafter
from specengine.core.transfer import pinned
from specengine.draft.suffix.drafter import SuffixDrafter
from specengine.engine.grounds import if_hesitant
from specengine.engine.host_drafts import HostDrafter
from specengine.engine.round_form import Wish


class MixedDrafts(HostDrafter):
    """Drafts as draft.hybrid.HybridDrafter has them: a request of whose text the host has a draft
    has that one, the others have the model's. Text may go deeper than the model.

    It drafts as the model does where nobody has text; `beside_text` gives who drafts elsewhere.
    """

    def __init__(self, inner: RowDrafter, reader: SuffixDrafter, model_steps: int) -> None:
        """reader: of the text. model_steps: of the model's deepest drafts."""
        self.inner, self.reader, self.model_steps = inner, reader, model_steps
        self._hesitant = if_hesitant(inner)

    @abstractmethod
    def beside_text(self, model_steps: int) -> RowDrafter:
        """model_steps: how deep the model drafts; 0 where all that draft have text."""

    @abstractmethod
    def _send(self, proposal: DraftProposal) -> Wish:
        """Drafts of text to the device -> what a round of these alone is to be."""

    def set(self, proposal: DraftProposal) -> Wish:
        return self.set_beside(proposal, [0] * len(proposal.num_nodes))

    def set_beside(self, proposal: DraftProposal, levels: list[int]) -> Wish:
        of_text = [count > 0 for count in proposal.num_drafted]
        pairs = zip(of_text, levels, strict=True)
        own = [0 if is_text else min(most, self.model_steps) for is_text, most in pairs]
        if proposal.is_empty:
            return Wish(own)
        text = self._send(proposal)
        drafted = [*map(max, text.num_drafted, own)]
        return text._replace(num_drafted=drafted, model_steps=max(own), of_text=of_text)

    def is_ready(self, req: Req) -> bool:
        """As core.spec.HesitantRowDrafter."""
        return self._hesitant is None or self._hesitant.is_ready(req)

    def draft_rows(self, rows: RowBatch, num_steps: int, picks: DraftPicks | None = None) -> Tensor:
        assert num_steps <= self.model_steps, "nobody has text here"
        return self.inner.draft_rows(rows, num_steps, picks)

    def observe_rows(
        self, rows: RowBatch, output: RowsOutput, tokens_BN: Tensor, accepted_B: Tensor
    ) -> None:
        self.inner.observe_rows(rows, output, tokens_BN, accepted_B)

    def catch_up_rows(self, rows: RowBatch, tokens_BN: Tensor) -> None:
        """As core.others_drafts.LateRowDrafter, if the model is one."""
        if isinstance(self.inner, LateRowDrafter):
            self.inner.catch_up_rows(rows, tokens_BN)


class HybridDrafts(MixedDrafts):
    """Chains. Where text goes deeper than the model, its drafts are padded with token 0."""

    def __init__(
        self,
        inner: RowDrafter,
        reader: SuffixDrafter,
        batch_size: int,
        num_steps: int,
        device: torch.device,
    ) -> None:
        """inner: of chains. reader: of the text. num_steps: of the longest draft."""
        assert inner.row_steps is not None
        super().__init__(inner, reader, inner.row_steps)
        self.row_steps = num_steps
        # int64 [B, num_steps + 1]: drafts of text, padded with 0, and how many there are: they
        # begin where kernels like it (core/columns.py). Rows past those of the last round hold
        # what earlier ones had.
        self.text = torch.zeros(batch_size, num_steps + 1, dtype=torch.int64, device=device)

    def _send(self, proposal: DraftProposal) -> Wish:
        size, width = proposal.tokens.shape
        # Made anew each time: the copy may still be on its way when the next round is drafted.
        text = np.zeros((size, self.text.shape[1]), np.int64)
        text[:, -1] = proposal.num_drafted
        exists_BK = np.arange(1, width) <= text[:, -1:]
        np.copyto(text[:, : width - 1], proposal.tokens[:, 1:].numpy(), where=exists_BK)
        moved = pinned(torch.from_numpy(text), self.text.device)
        self.text[:size].copy_(moved, non_blocking=True)
        return Wish(proposal.num_drafted)

    def beside_text(self, model_steps: int) -> BesideText:
        return BesideText(self, model_steps)


class BesideText:
    """A core.spec.RowDrafter for rounds in which somebody has text."""

    def __init__(self, drafts: HybridDrafts, model_steps: int) -> None:
        self.drafts = drafts
        self.model_steps = model_steps
        self.row_steps = drafts.row_steps

    def draft_rows(self, rows: RowBatch, num_steps: int, picks: DraftPicks | None = None) -> Tensor:
        text = self.drafts.text[: len(rows.rows_B)]
        counts_B1, drafts_BK = text[:, -1:], text[:, :num_steps]
        if most := self.model_steps:
            own_BM = self.drafts.inner.draft_rows(rows, most, picks)
            first_BM = torch.where(counts_B1 > 0, drafts_BK[:, :most], own_BM)
            deeper_BK = drafts_BK[:, most:]
            drafts_BK = torch.cat([first_BM, deeper_BK], dim=1) if num_steps > most else first_BM
        if picks is not None:
            picks.override(drafts_BK, counts_B1[:, 0] > 0)
        return drafts_BK

    def observe_rows(
        self, rows: RowBatch, output: RowsOutput, tokens_BN: Tensor, accepted_B: Tensor
    ) -> None:
        self.drafts.catch_up_rows(rows, tokens_BN)
        self.drafts.observe_rows(rows, output, tokens_BN, accepted_B)
