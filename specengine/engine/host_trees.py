"""Draft trees that come from the host into rounds that run on the device."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from specengine.core.batch import RowBatch
from specengine.core.draft_choosing import DraftEdits, DraftPicks
from specengine.core.spec import DraftProposal
from specengine.core.transfer import pinned
from specengine.core.weighed_trees import TreeDraws
from specengine.engine.host_drafts import HostDrafter
from specengine.engine.round_form import Wish
from specengine.kernels.tree_build import DraftTree, TreeLimits
from specengine.kernels.tree_shape import tree_shape


class HostTrees(HostDrafter):
    """A core.spec.TreeRowDrafter. Smaller trees are padded with nodes that are their own parents:
    no path from the root comes by one, so that none ever stands, whatever its token. What it writes
    goes to a place past those that stand, as any node's, and nobody looks there but itself.
    """

    row_steps = None
    row_slots = 0

    def __init__(
        self,
        batch_size: int,
        max_nodes: int,
        most_nodes: Callable[[int], int],
        device: torch.device,
    ) -> None:
        """max_nodes: of a tree, root included. most_nodes: likewise, of one so deep."""
        self.most_nodes = most_nodes
        self.tree_row_steps = max_nodes - 1  # of a tree that does not branch
        self._none = np.stack([np.zeros(max_nodes, np.int64), np.arange(max_nodes)])
        self._none[1, 0] = -1
        # int64 [B, 2, max_nodes]: tokens and parents. Rows past those of the last round hold trees
        # of earlier ones, which no request has.
        self.nodes = torch.from_numpy(self._none).repeat(batch_size, 1, 1).to(device)

    def set(self, proposal: DraftProposal) -> Wish:
        if proposal.is_empty:
            return Wish(proposal.num_drafted, drafted_nodes=proposal.num_drafted)
        given_B2N = np.stack([proposal.tokens.numpy(), proposal.parents.numpy()], axis=1)
        size, _, width = given_B2N.shape
        exists_BN = np.arange(width) < np.array(proposal.num_nodes)[:, None]
        # Made anew each time: the copy may still be on its way when the next round is drafted.
        nodes = np.tile(self._none, (size, 1, 1))
        np.copyto(nodes[:, :, :width], given_B2N, where=exists_BN[:, None])
        moved = pinned(torch.from_numpy(nodes), self.nodes.device)
        self.nodes[:size].copy_(moved, non_blocking=True)
        levels = proposal.num_drafted
        if not proposal.is_chain:
            pairs = zip(nodes[:, 1].tolist(), proposal.num_nodes, strict=True)
            levels = [_depth(parents[:count]) for parents, count in pairs]
        return Wish(levels, drafted_nodes=proposal.num_drafted)

    def draft_rows(self, rows: RowBatch, num_steps: int, picks: DraftPicks | None = None) -> Tensor:
        assert num_steps == 0, "it drafts trees"
        return rows.roots_B.new_empty(len(rows.roots_B), 0)

    def num_tree_nodes(self, num_steps: int) -> int:
        return self.most_nodes(num_steps)

    def draft_tree_rows(
        self,
        rows: RowBatch,
        num_steps: int,
        edits: DraftEdits | None = None,
        num_nodes: int | None = None,
    ) -> DraftTree:
        """The first nodes of a tree are a tree, for parents stand before their children."""
        count = self.num_tree_nodes(num_steps) if num_nodes is None else num_nodes
        return tree_shape(rows.roots_B, self.nodes[: len(rows.rows_B)], count, num_steps)

    def draft_limited_rows(
        self,
        rows: RowBatch,
        num_steps: int,
        limits: TreeLimits | None,
        edits: DraftEdits | None = None,
        draws: TreeDraws | None = None,
    ) -> DraftTree:
        """Within limits the host has drafted, of what text gave: a node that it left out is its own
        parent, as rules that weigh drafts want it."""
        return self.draft_tree_rows(rows, num_steps)


def _depth(parents: list[int]) -> int:
    """Of the deepest node; parents stand before their children."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(1 + depths[parent])
    return max(depths)
