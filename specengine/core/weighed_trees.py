"""What drafters of trees promise to rules that weigh the target against the draft."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from specengine.core.batch import RowBatch
from specengine.core.draft_choosing import DraftEdits
from specengine.core.spec import TreeRowDrafter
from specengine.kernels.tree_build import DraftTree, TreeLimits
from specengine.kernels.tree_step import Drawn


class TreeDraws(Protocol):
    """Draws the children of nodes, of requests whose trees are sampled."""

    def take(self, logits_TV: Tensor, target_ids: Tensor | None) -> Drawn:
        """Of each row. logits_TV: as many rows a request, in order: the root's, then of each level
        in turn those that are gone on with. target_ids: as in DraftPicks.take."""
        ...


@runtime_checkable
class WeighedTreeDrafter(TreeRowDrafter, Protocol):
    """A TreeRowDrafter that drafts of a request what its `draft` would, whoever else is drafted
    for: rules that weigh drafts need that."""

    topk: int

    def draft_limited_rows(
        self,
        rows: RowBatch,
        num_steps: int,
        limits: TreeLimits | None,
        edits: DraftEdits | None = None,
        draws: TreeDraws | None = None,
    ) -> DraftTree:
        """As draft_tree_rows, of as many nodes as there may be; those that the limits leave out, or
        for which no token was left, are their own parents. limits: None is none. draws: of one that
        emits_probs."""
        ...
