"""Paths that a rule has decided on, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from specengine.kernels.accept import accept_tree_ref
from specengine.kernels.accept.types import Accepted, AcceptedPaths, RoundState
from specengine.kernels.tree.types import DraftTree


def accept_path(
    state: RoundState,
    rows_B: Tensor,
    found: Accepted,
    tree: DraftTree,
    num_steps: int,
    context: int,
) -> AcceptedPaths:
    (batch_size, num_nodes), width = tree.tokens_BN.shape, num_steps + 1
    nodes_N = torch.arange(num_nodes, device=rows_B.device)
    ends_B11 = found.ends_B[:, None, None].expand(-1, -1, num_nodes)
    on_path_BN = tree.mask_BNN.gather(1, ends_B11).squeeze(1)
    # Parents come before their children: a path is its nodes in order.
    place_BN = (on_path_BN.cumsum(1) - 1).masked_fill(~on_path_BN, width)
    room_BW = rows_B.new_zeros(batch_size, width + 1)
    nodes_BW = room_BW.scatter(1, place_BN, nodes_N.expand_as(place_BN))[:, :width]
    accepted_B = on_path_BN.sum(1) - 1
    places_W, accepted_B1 = torch.arange(width, device=rows_B.device), accepted_B[:, None]
    below_BW = pad(nodes_BW[:, 1:], (0, 1))
    tokens_BW = tree.tokens_BN.gather(1, below_BW)
    tokens_BW = tokens_BW.where(places_W != accepted_B1, found.tokens_B[:, None])
    # Past the path lies the root again, with its own.
    tokens_BW = tokens_BW.where(places_W <= accepted_B1, tokens_BW[:, :1])
    chosen_BN = torch.zeros_like(tree.tokens_BN).scatter(1, nodes_BW, tokens_BW)
    given = chosen_BN, nodes_BW, accepted_B, context
    paths = accept_tree_ref.move_on(state, rows_B, *given)
    drafted_B = (tree.parents_BN != nodes_N).sum(1) - 1
    state.outcomes[int(state.turn), :batch_size, 2 * width] = drafted_B
    return paths
