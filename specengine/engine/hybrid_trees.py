"""A model's trees on the device, and in place of some of them what the host found in text."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.core.batch import RowBatch
from specengine.core.draft_choosing import DraftEdits, DraftPicks
from specengine.core.interfaces import RowsOutput
from specengine.core.spec import DraftProposal, RowDrafter, TreeRowDrafter
from specengine.draft.suffix.drafter import SuffixDrafter
from specengine.engine.host_trees import HostTrees
from specengine.engine.hybrid_drafts import MixedDrafts
from specengine.engine.round_form import Wish
from specengine.kernels.tree_build import DraftTree, TreeLimits
from specengine.kernels.tree_shape import tree_shape


class HybridTrees(MixedDrafts):
    """A core.spec.TreeRowDrafter of a model and of text, of whom one may draft chains. Where rounds
    have more nodes than the model's tree, that is padded as HostTrees pads a text's."""

    row_steps = None

    def __init__(
        self,
        inner: RowDrafter,
        reader: SuffixDrafter,
        batch_size: int,
        num_steps: int,
        device: torch.device,
    ) -> None:
        """reader: of the text. num_steps: of a tree of as many nodes as there may be, if it does
        not branch."""
        self.grown: TreeRowDrafter | None = None  # who drafts trees; None: the model drafts chains
        deepest = inner.row_steps
        if isinstance(inner, TreeRowDrafter) and inner.tree_row_steps is not None:
            self.grown, deepest = inner, inner.tree_row_steps
        assert deepest is not None
        super().__init__(inner, reader, min(deepest, num_steps))
        self.text = HostTrees(batch_size, num_steps + 1, reader.most_nodes, device)
        self.tree_row_steps = num_steps
        self.row_slots = 0 if self.grown is None else self.grown.row_slots
        # Made before any capture, in which they would be nodes of the graph.
        self._nodes_N = nodes_N = torch.arange(num_steps + 1, device=device)
        self._above_N = nodes_N - 1
        self._missing_2N = torch.stack([torch.zeros_like(nodes_N), nodes_N])

    def _send(self, proposal: DraftProposal) -> Wish:
        return self.text.set(proposal)

    def own_nodes(self, num_steps: int) -> int:
        """Of the model's tree where so many levels are drafted, root included."""
        own = min(num_steps, self.model_steps)
        return 1 + own if self.grown is None or not own else self.grown.num_tree_nodes(own)

    def num_tree_nodes(self, num_steps: int) -> int:
        return max(self.own_nodes(num_steps), self.text.num_tree_nodes(num_steps))

    def draft_tree_rows(
        self,
        rows: RowBatch,
        num_steps: int,
        edits: DraftEdits | None = None,
        num_nodes: int | None = None,
    ) -> DraftTree:
        """Where nobody has text."""
        if self.grown is not None:
            return self.grown.draft_tree_rows(rows, num_steps, edits, num_nodes)
        count = self.own_nodes(num_steps) if num_nodes is None else num_nodes
        return tree_shape(rows.roots_B, self._own(rows, num_steps, edits), count, num_steps)

    def beside_text(self, model_steps: int) -> TreesBesideText:
        return TreesBesideText(self, model_steps)

    def draft_mixed_rows(
        self, rows: RowBatch, num_steps: int, model_steps: int, edits: DraftEdits | None
    ) -> DraftTree:
        """Where some have text, and the model drafts so deep for the others."""
        return self.mixed(rows, self._own(rows, model_steps, edits), num_steps)

    def mixed(self, rows: RowBatch, own_B2N: Tensor, num_steps: int) -> DraftTree:
        """own_B2N: int64, tokens and parents of the model's trees."""
        count = self.num_tree_nodes(num_steps)
        if own_B2N.shape[2] < count:
            missing_2N = self._missing_2N[:, own_B2N.shape[2] : count]
            own_B2N = torch.cat([own_B2N, missing_2N.expand(len(own_B2N), -1, -1)], dim=2)
        text_B2N = self.text.nodes[: len(own_B2N), :, :count]
        has_text_B11 = self.has_text(len(own_B2N))[:, None, None]
        nodes_B2N = torch.where(has_text_B11, text_B2N, own_B2N)
        return tree_shape(rows.roots_B, nodes_B2N, count, num_steps)

    def has_text(self, batch_size: int) -> Tensor:
        """bool [B], of the first requests. The first node behind a root is its child; where it is
        not there, its own."""
        return self.text.nodes[:batch_size, 1, 1] == 0

    def _own(self, rows: RowBatch, num_steps: int, edits: DraftEdits | None) -> Tensor:
        """int64 [B, 2, N], the model's tokens and parents."""
        if self.grown is not None:
            tree = self.grown.draft_tree_rows(rows, num_steps, edits)
            return torch.stack([tree.tokens_BN, tree.parents_BN], dim=1)
        return self.chains(rows, num_steps, edits)

    def chains(
        self,
        rows: RowBatch,
        num_steps: int,
        picks: DraftPicks | None,
        limits: TreeLimits | None = None,
    ) -> Tensor:
        """int64 [B, 2, num_steps + 1], likewise, of a model that drafts chains; what limits leave
        out is its own parent."""
        count = 1 + num_steps
        drafts_BK = self.inner.draft_rows(rows, num_steps, picks)
        tokens_BN = torch.cat([rows.roots_B[:, None], drafts_BK], dim=1)
        nodes_B2N = torch.stack([tokens_BN, self._above_N[:count].expand_as(tokens_BN)], dim=1)
        if limits is None:
            return nodes_B2N
        levels_B = limits.depths_B.minimum(limits.nodes_B - 1)
        exists_BN = self._nodes_N[:count] <= levels_B[:, None]
        return torch.where(exists_BN[:, None], nodes_B2N, self._missing_2N[:, :count])


class TreesBesideText:
    """A core.spec.TreeRowDrafter for rounds in which somebody has text."""

    row_steps = None

    def __init__(self, drafts: HybridTrees, model_steps: int) -> None:
        self.drafts = drafts
        self.model_steps = model_steps
        self.tree_row_steps, self.row_slots = drafts.tree_row_steps, drafts.row_slots

    def draft_rows(self, rows: RowBatch, num_steps: int, picks: DraftPicks | None = None) -> Tensor:
        return self.drafts.draft_rows(rows, num_steps, picks)

    def num_tree_nodes(self, num_steps: int) -> int:
        drafts = self.drafts if self.model_steps else self.drafts.text
        return drafts.num_tree_nodes(num_steps)

    def draft_tree_rows(
        self,
        rows: RowBatch,
        num_steps: int,
        edits: DraftEdits | None = None,
        num_nodes: int | None = None,
    ) -> DraftTree:
        assert num_nodes is None, "these trees are never cut"
        if self.model_steps:
            return self.drafts.draft_mixed_rows(rows, num_steps, self.model_steps, edits)
        return self.drafts.text.draft_tree_rows(rows, num_steps, edits)

    def observe_rows(
        self, rows: RowBatch, output: RowsOutput, tokens_BN: Tensor, accepted_B: Tensor
    ) -> None:
        """A model that grew trees ran what they begin with, and runs again what stands of them,
        whoever drafted it. Else it catches up."""
        if not self.model_steps or self.drafts.grown is None:
            self.drafts.catch_up_rows(rows, tokens_BN)
        self.drafts.observe_rows(rows, output, tokens_BN, accepted_B)
