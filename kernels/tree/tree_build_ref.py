"""The tree that goes to verification, in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from specengine.kernels.tree.types import DraftTree, Found, TreeLimits


@dataclass(frozen=True)
class Chosen:
    """The nodes of a tree, but for what follows from their parents."""

    tokens_BN: Tensor  # int64
    parents_BN: Tensor  # int64, the root's is -1
    candidates_BN: Tensor | None = None  # int64


def choose(roots_B: Tensor, found: Found, num_nodes: int) -> Chosen:
    """The best, best first."""
    order_BC = found.scores_BC.sort(dim=-1, descending=True, stable=True).indices
    chosen_BM = order_BC[:, : num_nodes - 1]
    batch_size, count = order_BC.shape
    # One place before all candidates for the root, which is -1 among parents.
    node_of = roots_B.new_zeros(batch_size, count + 1)
    nodes_N = torch.arange(num_nodes, device=roots_B.device)
    node_of.scatter_(1, chosen_BM + 1, nodes_N[1:].expand_as(chosen_BM))
    parents_BM = node_of.gather(1, found.parents_BC.gather(1, chosen_BM) + 1)
    tokens_BM = found.tokens_BC.gather(1, chosen_BM)
    return Chosen(
        torch.cat([roots_B[:, None], tokens_BM], dim=1), pad(parents_BM, (1, 0), value=-1)
    )


def choose_within(roots_B: Tensor, found: Found, num_nodes: int, limits: TreeLimits) -> Chosen:
    batch_size, count = found.scores_BC.shape
    most_B = limits.nodes_B.clamp(max=num_nodes)
    found_B1 = limits.found_within(most_B - 1, count)[:, None]
    kept_B1 = limits.found_within(limits.depths_B.minimum(most_B - 1), count)[:, None]
    candidates_C = torch.arange(count, device=roots_B.device)
    scores_BC = found.scores_BC.masked_fill(candidates_C >= found_B1, float("-inf"))
    order_BM = scores_BC.sort(dim=-1, descending=True, stable=True).indices[:, : num_nodes - 1]
    nodes_N = torch.arange(num_nodes, device=roots_B.device)
    tokens_BM = found.tokens_BC.gather(1, order_BM)
    stays_BM = (nodes_N[1:] < most_B[:, None]) & (order_BM < kept_B1) & (tokens_BM >= 0)
    node_BM = stays_BM.cumsum(1)
    # One place before all candidates for the root, and one behind them for what does not stay; the
    # same for nodes; the place behind them stays empty.
    nowhere_BM = order_BM.masked_fill(~stays_BM, count)
    node_of = roots_B.new_zeros(batch_size, count + 2).scatter_(1, nowhere_BM + 1, node_BM)
    parents_BM = node_of.gather(1, found.parents_BC.gather(1, order_BM) + 1)
    place_BM = node_BM.masked_fill(~stays_BM, num_nodes)
    tokens_BN = pad(roots_B[:, None], (0, num_nodes)).scatter_(1, place_BM, tokens_BM)
    candidates_BN = torch.zeros_like(tokens_BN).scatter_(1, place_BM, order_BM)
    parents_BN = pad(nodes_N, (0, 1)).repeat(batch_size, 1)
    parents_BN[:, :1].fill_(-1)
    parents_BN.scatter_(1, place_BM, parents_BM)
    every = tokens_BN, parents_BN, candidates_BN
    return Chosen(*(x[:, :num_nodes].contiguous() for x in every))


def tree_build(
    roots_B: Tensor, found: Found, num_nodes: int, num_steps: int, limits: TreeLimits | None
) -> DraftTree:
    if limits is None:
        chosen = choose(roots_B, found, num_nodes)
    else:
        chosen = choose_within(roots_B, found, num_nodes, limits)
    tree = climb(chosen.tokens_BN, chosen.parents_BN, num_steps)
    return replace(tree, candidates_BN=chosen.candidates_BN)


def climb(tokens_BN: Tensor, parents_BN: Tensor, num_steps: int) -> DraftTree:
    """With what follows from the parents."""
    nodes_N = torch.arange(parents_BN.shape[1], device=parents_BN.device)
    ancestor_BN = nodes_N.expand(len(parents_BN), -1)
    above_BN = parents_BN.clamp(min=0)
    depths_BN = torch.zeros_like(ancestor_BN)
    mask_BNN = ancestor_BN[:, :, None] == nodes_N
    for _ in range(num_steps):
        depths_BN = depths_BN + (ancestor_BN > 0)
        ancestor_BN = above_BN.gather(1, ancestor_BN)
        mask_BNN = mask_BNN | (ancestor_BN[:, :, None] == nodes_N)
    return DraftTree(tokens_BN, parents_BN, depths_BN, mask_BNN)
