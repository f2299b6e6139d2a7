"""How drafts are chosen where that is done on the device alone."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from specengine.kernels.tree.types import Beams, Drawn


class DraftPicks(Protocol):
    """Chooses the drafts of chains, where they are not simply the best tokens."""

    def take(self, logits_BV: Tensor, target_ids: Tensor | None) -> Tensor:
        """int64 [B], the next level's tokens, as the target numbers them. Called for each level in
        turn. logits_BV: float32, of the draft's vocabulary; may be written over. target_ids: int64
        [V], the target's ids of that vocabulary; None where they are the same."""
        ...

    def override(self, tokens_BK: Tensor, are_B: Tensor) -> None:
        """Called after the last level was taken, if any was: the drafts of these requests are
        others, and were certain. tokens_BK: int64, of all levels. are_B: bool."""
        return


class DraftEdits(DraftPicks, Protocol):
    """The logit edits of requests, as far as drafts follow them: tokens drafted in the same round
    need not count. The target's own rows decide."""

    def apply(self, logits_TV: Tensor, target_ids: Tensor | None) -> Tensor:
        """logits_TV: float32, equally many rows a request, in order; may be written over.
        target_ids: as in `take`."""
        ...

    def in_tree(
        self, logits_TV: Tensor, target_ids: Tensor | None, beams: Beams | None
    ) -> tuple[Tensor, Tensor | None]:
        """As `apply`, for the rows of these nodes, or with None of the roots, each level in turn;
        and the target's ids of what is returned."""
        return self.apply(logits_TV, target_ids), target_ids

    def take(self, logits_BV: Tensor, target_ids: Tensor | None) -> Tensor:
        best_B = self.apply(logits_BV, target_ids).argmax(-1)
        return best_B if target_ids is None else target_ids[best_B]


class TreeDraws(Protocol):
    """Draws the children of nodes, of requests whose trees are sampled."""

    def take(self, logits_TV: Tensor, target_ids: Tensor | None) -> Drawn:
        """Pick the drafts of each row. logits_TV: equally many rows a request: the root's, then of
        each level in turn those that are expanded. target_ids: as in DraftPicks.take."""
        ...
