"""What requests change of a draft's logits, where drafts are chosen on the device alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specengine.core.draft_picks import DraftEdits
from specengine.core.sampling_batch import LogitEdits, SamplingBatch


@dataclass(frozen=True)
class RowEdits(DraftEdits):
    """In fixed buffers, [B, Vd]: positive logits are divided by `scale` and
    others multiplied by it, and then `shift` is added. So penalties, bias and min_tokens are what
    they are in layers/logits, but that bias comes last, and that tokens drafted in the same round
    are not counted."""

    scale_BV: Tensor
    shift_BV: Tensor

    @classmethod
    def neutral(cls, batch_size: int, vocab_size: int, device: torch.device) -> RowEdits:
        scale_BV = torch.ones(batch_size, vocab_size, device=device)
        return cls(scale_BV, torch.zeros_like(scale_BV))

    def fill(self, sampling: SamplingBatch, target_ids: Tensor | None) -> None:
        """target_ids: int64 [Vd], the target's id of each token of the draft's vocabulary; None
        where they are the same."""
        assert sampling.edits is not None
        scale_BV, shift_BV = _dense(sampling, sampling.edits)
        if target_ids is not None:
            scale_BV, shift_BV = scale_BV[:, target_ids], shift_BV[:, target_ids]
        self.scale_BV[: len(scale_BV)].copy_(scale_BV)
        self.shift_BV[: len(shift_BV)].copy_(shift_BV)

    def apply(self, logits_TV: Tensor, target_ids: Tensor | None) -> Tensor:
        """Whatever target_ids: `fill` has turned all into the draft's vocabulary."""
        scale_TV, shift_TV = self.scale_BV, self.shift_BV
        per_request = len(logits_TV) // len(scale_TV)
        if per_request > 1:
            scale_TV, shift_TV = (
                each.repeat_interleave(per_request, 0) for each in (scale_TV, shift_TV)
            )
        scaled_TV = torch.where(logits_TV > 0, logits_TV / scale_TV, logits_TV * scale_TV)
        return scaled_TV + shift_TV


def is_exact(sampling: SamplingBatch) -> bool:
    """Whether RowEdits' drafts are bound to be DraftChoice's: no request's edits look at more than
    the token."""
    edits = sampling.edits
    return edits is None or (edits.penalties is None and edits.min_tokens is None)


def _dense(sampling: SamplingBatch, edits: LogitEdits) -> tuple[Tensor, Tensor]:
    """Scale and shift, [B, V]."""
    slots_B = edits.slots
    shift_BV = torch.zeros(len(slots_B), sampling.vocab_size, device=slots_B.device)
    scale_BV = torch.ones_like(shift_BV)
    if edits.bias is not None:
        shift_BV += edits.bias[slots_B]
    if edits.penalties is not None:
        penalties = edits.penalties
        counts_BV = penalties.counts[slots_B]
        said_BV = counts_BV > 0
        seen_BV = said_BV | penalties.prompt_seen[slots_B]
        shift_BV -= penalties.frequency[:, None] * counts_BV
        shift_BV -= penalties.presence[:, None] * said_BV
        scale_BV = torch.where(seen_BV, penalties.repetition[:, None], scale_BV)
    if edits.min_tokens is not None:
        assert sampling.output_pos is not None
        short_B = sampling.output_pos < edits.min_tokens.min_tokens
        forbidden_BV = edits.min_tokens.forbidden[slots_B] & short_B[:, None]
        shift_BV.masked_fill_(forbidden_BV, float("-inf"))
    return scale_BV, shift_BV
