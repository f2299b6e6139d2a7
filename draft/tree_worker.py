"""The base of drafters that run a model whose trees can be drafted on the device alone."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from specengine.core.draft_context import DraftContext
from specengine.core.draft_picks import DraftEdits, TreeDraws
from specengine.core.rows import RowBatch
from specengine.draft.tree_rows import TreeRows
from specengine.draft.worker import DraftWorker
from specengine.kernels.tree.types import DraftTree, TreeLimits


class TreeDraftWorker(DraftWorker):
    """A drafter that drafts chains or trees on the device: the trees."""

    continues_states = False  # whether a row takes in the state that its token came from

    def __init__(self, context: DraftContext) -> None:
        super().__init__(context)
        self.tree_rows = TreeRows(self, context.num_rows)

    @abstractmethod
    def root_states(self, rows: RowBatch) -> Tensor:
        """[B, H], those that the roots' children come from."""

    @property
    def draft_slots(self) -> int:  # type: ignore[override]
        return self.first_place + (self.num_steps - 1) * self.topk

    def num_tree_nodes(self, num_steps: int) -> int:
        return self.tree_rows.num_nodes(num_steps)

    def draft_tree_rows(
        self,
        rows: RowBatch,
        num_steps: int,
        edits: DraftEdits | None = None,
        num_nodes: int | None = None,
        limits: TreeLimits | None = None,
        draws: TreeDraws | None = None,
    ) -> DraftTree:
        return self.tree_rows.draft(rows, num_steps, edits, num_nodes, limits, draws)
