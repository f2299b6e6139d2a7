"""From the target's token at every node to the path that stands."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specengine.core.spec import DraftProposal
from specengine.target.verify.tree import ancestor_mask, node_mask


@dataclass(frozen=True)
class Walk:
    """The accepted path of one request, root first, and the token sampled at each node of it."""

    nodes: list[int]
    tokens: list[int]


def walk_chains(proposal: DraftProposal, sampled_BN: Tensor) -> list[Walk]:
    """Accept drafted tokens up to the first that the target did not sample."""
    exists = node_mask(proposal.num_nodes, sampled_BN.shape[1], sampled_BN.device)
    matches = (proposal.tokens[:, 1:] == sampled_BN[:, :-1]) & exists[:, 1:]
    accepted = matches.long().cumprod(1).sum(1, keepdim=True)
    table = torch.cat([accepted, sampled_BN], dim=1).tolist()
    return [Walk(list(range(row[0] + 1)), row[1 : row[0] + 2]) for row in table]


def walk_trees(proposal: DraftProposal, sampled_BN: Tensor) -> list[Walk]:
    """Accept the deepest node on whose path every token is what the target sampled above it.

    Siblings carry different tokens, so that accepted nodes form one path. A node comes after its
    parent, so that sorting a path's nodes puts the root first.
    """
    width = sampled_BN.shape[1]
    exists = node_mask(proposal.num_nodes, width, sampled_BN.device)
    mask = ancestor_mask(proposal.parents, exists)
    expected = sampled_BN.gather(1, proposal.parents.clamp(0, width - 1))
    matches = proposal.tokens == expected
    matches[:, 0] = True
    accepted = exists & ~(mask & ~matches[:, None, :]).any(-1)
    end = (mask.sum(-1) * accepted).argmax(1)
    on_path = mask[torch.arange(len(end), device=end.device), end]
    order = torch.arange(width, device=end.device).where(on_path, width).sort(1).values
    tokens = sampled_BN.gather(1, order.clamp(max=width - 1))
    table = torch.cat([on_path.sum(1, keepdim=True), order, tokens], dim=1).tolist()
    return [Walk(row[1 : 1 + row[0]], row[1 + width : 1 + width + row[0]]) for row in table]
