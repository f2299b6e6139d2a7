"""How drafts are chosen where that is done on the device alone."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class DraftEdits(Protocol):
    """What requests change of their logits, as far as drafts follow it: tokens drafted in the same
    round need not count. The target's own rows decide."""

    def apply(self, logits_TV: Tensor, target_ids: Tensor | None) -> Tensor:
        """logits_TV: float32, as many rows a request, in order; may be written over. target_ids:
        int64 [V], the target's ids of a draft's vocabulary."""
        ...


class DraftDraws(Protocol):
    """Chains sampled on the device alone, and whatever is kept of what they were drawn from."""

    def take(self, logits_BV: Tensor, target_ids: Tensor | None) -> Tensor:
        """int64 [B], the next level's tokens, as the target numbers them. logits_BV: float32, of
        the draft's vocabulary. target_ids: int64 [V], the target's ids of that."""
        ...
