"""The shape of a batch of draft trees."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Tree:
    """Shape of a ragged batch of draft trees; absent for chains, which need no mask.

    depths_T: depth of each node below its root (root 0), flat over the batch.
    mask_BNN: bool, True where node i (row) sees node j (column): its ancestors and itself. Rows
    and columns past a request's node count are False.
    num_past: leading columns of nodes whose KV is written already, the last num_past
    tokens of each prefix: a drafter that grows a tree level by level runs the new level alone.
    Then mask_BNN is [B, N, num_past + N], and depths_T counts from prefix_lens - num_past.
    """

    depths_T: Tensor
    mask_BNN: Tensor
    num_past: int = 0
