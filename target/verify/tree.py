"""Shapes of ragged batches of draft trees, computed from parents, without a loop over nodes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specengine.core.transfer import sent


def node_mask(num_nodes: list[int], width: int, device: torch.device) -> Tensor:
    """bool [B, N], True at the nodes that exist."""
    counts = sent(torch.tensor(num_nodes, dtype=torch.int64), device)
    return torch.arange(width, device=device) < counts[:, None]


def flat_nodes(num_nodes: list[int], width: int) -> Tensor:
    """int64 [T] on the CPU: where the nodes that exist lie in a flattened [B, N]."""
    exists = np.arange(width) < np.array(num_nodes)[:, None]
    return torch.from_numpy(exists.ravel().nonzero()[0])


def ancestor_mask(parents_BN: Tensor, exists_BN: Tensor) -> Tensor:
    """bool [B, N, N], True where node i (row) is or descends from node j (column).

    parents: int64, -1 for the root; entries of nodes that do not exist are never read. Squaring the
    relation "is or is a child of" doubles its reach, so log2(N) products complete it.
    """
    width = parents_BN.shape[1]
    nodes = torch.arange(width, device=parents_BN.device)
    reach = (parents_BN[:, :, None] == nodes) | (nodes[:, None] == nodes)
    reach &= exists_BN[:, :, None] & exists_BN[:, None, :]
    for _ in range((width - 1).bit_length()):
        steps = reach.float()
        reach = steps @ steps > 0
    return reach


def depths(mask_BNN: Tensor) -> Tensor:
    """int64 [B, N] from an ancestor mask: the root has 0, nodes that do not exist -1."""
    return mask_BNN.sum(-1) - 1
