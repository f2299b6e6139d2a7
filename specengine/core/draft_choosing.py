"""How drafts are chosen where that is done on the device alone."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from specengine.kernels.tree_step import Beams


class DraftPicks(Protocol):
    """Chooses the drafts of chains, where they are not simply the best tokens."""

    def take(self, logits_BV: Tensor, target_ids: Tensor | None) -> Tensor:
        """int64 [B], the next level's tokens, as the target numbers them. logits_BV: float32, of
        the draft's vocabulary; may be written over. target_ids: int64 [V], the target's ids of
        that. Asked for each level in turn."""
        ...

    def override(self, tokens_BK: Tensor, are_B: Tensor) -> None:
        """After the last level was taken, if any was: these requests' drafts are others, and were
        certain. tokens_BK: int64, of all levels. are_B: bool."""
        return


class DraftEdits(DraftPicks, Protocol):
    """What requests change of their logits, as far as drafts follow it: tokens drafted in the same
    round need not count. The target's own rows decide."""

    def apply(self, logits_TV: Tensor, target_ids: Tensor | None) -> Tensor:
        """logits_TV: float32, as many rows a request, in order; may be written over. target_ids:
        as in `take`."""
        ...

    def in_tree(
        self, logits_TV: Tensor, target_ids: Tensor | None, beams: Beams | None
    ) -> tuple[Tensor, Tensor | None]:
        """As `apply`, of the rows of these nodes, or with None of the roots, each level in turn;
        and the target's ids of what comes."""
        return self.apply(logits_TV, target_ids), target_ids

    def take(self, logits_BV: Tensor, target_ids: Tensor | None) -> Tensor:
        best_B = self.apply(logits_BV, target_ids).argmax(-1)
        return best_B if target_ids is None else target_ids[best_B]
