"""The tree that goes to verification, by sglang-kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sgl_kernel import build_tree_kernel_efficient
from torch import Tensor

from specengine.kernels.tree import tree_build_ref
from specengine.kernels.tree.types import DraftTree, Found

_OF_NODES_ALONE = 1  # tree_mask_mode: n x n, without the keys before the tree


@dataclass(frozen=True)
class Links:
    """A tree as sglang-kernel walks it; -1 where there is no node."""

    index_BN: Tensor  # int64, among the nodes of the batch
    child_BN: Tensor  # int64, the first
    sibling_BN: Tensor  # int64, the next
    depths_BN: Tensor  # int64
    mask_BNN: Tensor  # bool


def links(parents_BN: Tensor) -> Links:
    """Links of any trees. Nodes are numbered as candidates are: node i below p is candidate p * N +
    i, and what was found below the p-th of those gone on with has p * N in its index."""
    batch_size, num_nodes = parents_BN.shape
    nodes_N = torch.arange(num_nodes, device=parents_BN.device)
    candidates_BN = parents_BN.clamp(min=0) * num_nodes + nodes_N
    nowhere = torch.full_like(parents_BN, -1)
    found = Links(
        index_BN=nowhere.clone(),
        child_BN=nowhere.clone(),
        sibling_BN=nowhere,
        depths_BN=torch.zeros_like(parents_BN),
        mask_BNN=parents_BN.new_zeros(batch_size, num_nodes, num_nodes, dtype=torch.bool),
    )
    build_tree_kernel_efficient(
        torch.nn.functional.pad(candidates_BN, (0, 1)),  # topk * (depth - 1) + 1 columns
        candidates_BN[:, 1:].contiguous(),
        parents_BN.new_zeros(batch_size),
        found.mask_BNN.view(-1),
        found.depths_BN.view(-1),
        found.index_BN,
        found.child_BN,
        found.sibling_BN,
        num_nodes,
        2,
        num_nodes,
        _OF_NODES_ALONE,
    )
    return found


def tree_build(roots_B: Tensor, found: Found, num_nodes: int) -> DraftTree:
    chosen = tree_build_ref.choose(roots_B, found, num_nodes)
    tree = links(chosen.parents_BN)
    return DraftTree(chosen.tokens_BN, chosen.parents_BN, tree.depths_BN, tree.mask_BNN)
