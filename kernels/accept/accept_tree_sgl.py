"""Acceptance of trees by sglang-kernel."""

from __future__ import annotations

import torch
from sgl_kernel import verify_tree_greedy
from torch import Tensor

from specengine.kernels.accept import accept_tree_ref
from specengine.kernels.accept.types import AcceptedPaths, RoundState
from specengine.kernels.tree.tree_build_sgl import links
from specengine.kernels.tree.types import DraftTree


def accept_tree(
    state: RoundState,
    rows_B: Tensor,
    chosen_BN: Tensor,
    tree: DraftTree,
    num_steps: int,
    context: int,
) -> AcceptedPaths:
    batch_size, num_nodes = chosen_BN.shape
    found = links(tree.parents_BN)
    accepted_B = rows_B.new_empty(batch_size, dtype=torch.int32)
    index_BW = rows_B.new_zeros(batch_size, num_steps + 1, dtype=torch.int32)
    verify_tree_greedy(
        rows_B.new_empty(batch_size * num_nodes, dtype=torch.int32),
        index_BW,
        accepted_B,
        tree.tokens_BN.contiguous(),
        found.index_BN,
        found.child_BN,
        found.sibling_BN,
        chosen_BN.contiguous(),
    )
    places_W = torch.arange(num_steps + 1, device=chosen_BN.device)
    accepted_B = accepted_B.long().minimum(state.max_accepted[rows_B])
    nodes_BW = (index_BW.long() % num_nodes).where(places_W <= accepted_B[:, None], 0)
    return accept_tree_ref.move_on(state, rows_B, chosen_BN, nodes_BW, accepted_B, context)
