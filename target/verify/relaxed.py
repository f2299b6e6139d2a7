"""Lossy: drafts are accepted where they are nearly as good as the target's own token."""

from __future__ import annotations

from itertools import accumulate
from typing import Self

import torch
from torch import Tensor

from specengine.core.config import SpecConfig
from specengine.core.interfaces import LogitsOutput
from specengine.core.sampling_batch import SamplingBatch
from specengine.core.spec import DraftProposal
from specengine.core.transfer import sent
from specengine.kernels.accept.accept_relaxed import accept_relaxed
from specengine.kernels.accept.types import Accepted, RelaxedRound
from specengine.kernels.dispatch import Backend
from specengine.layers.logits import RowMap
from specengine.target.verify.match import MatchVerifier
from specengine.target.verify.rows import edited_by_chunks, row_map
from specengine.target.verify.walk import Walk, to_host


class RelaxedVerifier(MatchVerifier):
    """Like MatchVerifier, but where no child carries the token that the target samples, the first
    fair child is accepted: one not forbidden, among the target's top_k tokens, and with a
    probability, taken before temperature, at most `delta` below the best one's. The output is not
    the target's, and every result says so."""

    is_lossy = True
    text_depends_on_drafts = True
    device_rule = "relaxed"
    keeps_logits = True

    def __init__(self, top_k: int, delta: float, backend: Backend = "auto") -> None:
        super().__init__()
        self.top_k = top_k
        self.delta = delta
        self.backend = backend

    @classmethod
    def from_spec(cls, spec: SpecConfig) -> Self:
        return cls(spec.relaxed_top_k, spec.relaxed_delta)

    def walks(
        self, output: LogitsOutput, sampling: SamplingBatch, proposal: DraftProposal
    ) -> list[Walk]:
        if proposal.is_empty:
            return super().walks(output, sampling, proposal)
        rows, device = row_map(proposal, sampling), output.logits.device
        counts = proposal.num_nodes
        sizes = sent(torch.tensor([counts, [0, *accumulate(counts[:-1])]]), device)
        drafts = RelaxedRound(
            logits_TV=_edited(output.logits, sampling, rows),
            chosen_T=self.sampler(output, sampling, rows),
            tokens_BN=sent(proposal.tokens, device),
            parents_BN=sent(proposal.parents, device),
            counts_B=sizes[0],
            roots_B=sizes[1],
        )
        return to_host(self.decide(drafts), drafts.tokens_BN, drafts.parents_BN)

    def decide(self, drafts: RelaxedRound) -> Accepted:
        """The accepted path and the token after it."""
        return accept_relaxed(drafts, self.top_k, self.delta, backend=self.backend)


def _edited(logits_TV: Tensor, sampling: SamplingBatch, rows: RowMap) -> Tensor:
    """The logits that drafts are compared by; logits_TV itself where no request edits."""
    if sampling.edits is None and sampling.mask is None:
        return logits_TV
    return edited_by_chunks(logits_TV, sampling, rows)
