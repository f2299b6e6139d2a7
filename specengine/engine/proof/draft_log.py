"""Sampled drafts held against the probabilities that they report."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specengine.core.batch import ScheduleBatch
from specengine.core.drafter import Drafter
from specengine.core.spec import DraftProposal
from specengine.engine.proof.check import chi_squared_p

_CELLS = 20


class DraftLog:
    """Where each sampled draft lies in the distribution that it reports, likeliest tokens first and
    at a random place within its own share (randomised probability integral transform, Brockwell
    2007). Uniform on [0, 1) where every draft was drawn from what is reported, siblings without
    those before them, and is in the proposal whatever token was drawn."""

    def __init__(self) -> None:
        self.counts = torch.zeros(_CELLS, dtype=torch.int64)
        self.num_impossible = 0  # drafts to which their own report gives no chance
        self._generator = torch.Generator().manual_seed(0)

    @property
    def num_drafts(self) -> int:
        return int(self.counts.sum()) + self.num_impossible

    @property
    def p_value(self) -> float:
        """χ² against the uniform distribution; 0 where a draft is impossible, or none was seen."""
        if self.num_impossible or not self.num_drafts:
            return 0.0
        return chi_squared_p(self.counts, torch.full((_CELLS,), self.num_drafts / _CELLS))

    def watch(self, drafter: Drafter) -> None:
        """Note what it drafts from now on, for requests that all sample."""
        draft = drafter.draft

        def noted(batch: ScheduleBatch) -> DraftProposal:
            proposal = draft(batch)
            self.note(proposal)
            return proposal

        watched: Any = drafter
        watched.draft = noted

    def note(self, proposal: DraftProposal) -> None:
        if proposal.draft_probs is None:
            return
        tokens_BN, parents_BN = proposal.tokens.cpu(), proposal.parents.cpu()
        num_nodes_B = torch.tensor(proposal.num_nodes)
        for node in range(1, tokens_BN.shape[1]):
            there_B = num_nodes_B > node
            probs_BV = proposal.draft_probs[:, node].cpu().double()
            for other in range(1, node):
                is_sibling_B1 = (parents_BN[:, other] == parents_BN[:, node])[:, None]
                without_BV = probs_BV.scatter(1, tokens_BN[:, other, None], 0.0)
                probs_BV = torch.where(is_sibling_B1, without_BV, probs_BV)
            self._note(probs_BV[there_B], tokens_BN[there_B, node])

    def _note(self, probs_RV: Tensor, tokens_R: Tensor) -> None:
        probs_RV = probs_RV / probs_RV.sum(-1, keepdim=True)
        own_R1 = probs_RV.gather(1, tokens_R[:, None])
        ids_V = torch.arange(probs_RV.shape[1])
        before_RV = (probs_RV > own_R1) | ((probs_RV == own_R1) & (ids_V < tokens_R[:, None]))
        uniforms_R = torch.rand(len(tokens_R), generator=self._generator, dtype=torch.float64)
        places_R = (probs_RV * before_RV).sum(-1) + uniforms_R * own_R1[:, 0]
        possible_R = own_R1[:, 0] > 0
        self.num_impossible += int((~possible_R).sum())
        cells_R = (places_R[possible_R] * _CELLS).long().clamp(max=_CELLS - 1)
        self.counts += torch.bincount(cells_R, minlength=_CELLS)
