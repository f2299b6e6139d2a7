"""The base of drafters that run a model whose trees can be drafted on the device alone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

from torch import Tensor

from specengine.core.config import SpecConfig
from specengine.core.draft_context import DraftContext
from specengine.core.draft_picks import DraftEdits, TreeDraws
from specengine.core.request import Req
from specengine.core.rows import RowBatch
from specengine.draft.tree_rows import TreeRows
from specengine.draft.worker import DraftWorker
from specengine.kernels.tree.types import DraftTree, TreeLimits
from specengine.runner.model_runner import ModelRunner


class TreeDraftWorker(DraftWorker):
    """A drafter that drafts chains or trees on the device: the trees."""

    continues_states = False  # whether a row takes in the state that its token came from

    @classmethod
    def from_context(cls, context: DraftContext) -> TreeDraftWorker:
        return cls(context.runners, context.spec, context.node_limit, context.num_rows)

    def __init__(
        self,
        runners: Sequence[ModelRunner],
        spec: SpecConfig,
        node_limit: Callable[[Req], int],
        num_rows: int,
    ) -> None:
        """num_rows: of the page table, row 0 included."""
        super().__init__(runners, spec, node_limit)
        self.tree_rows = TreeRows(self, num_rows)

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
