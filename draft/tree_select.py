"""Which nodes of a growing draft tree are expanded, and which are sent to verification: EAGLE-2's
dynamic tree (Li et al. 2024, arXiv:2406.16858).

A node's score is the logarithm of its path's probability: no child scores above its parent. Ties go
to the node that was found first, so parents come before their children throughout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from specengine.core.transfer import sent


@dataclass(frozen=True)
class Candidates:
    """Nodes found below the root, C of each request, level by level, siblings side by side and best
    first."""

    tokens_BC: Tensor  # int64
    scores_BC: Tensor  # float32, of the whole path
    parents_BC: Tensor  # int64, index among the candidates; -1 is the root
    exists_BC: Tensor  # bool, nowhere True below a node that does not exist

    def joined(self, more: Candidates) -> Candidates:
        return Candidates(
            torch.cat([self.tokens_BC, more.tokens_BC], dim=1),
            torch.cat([self.scores_BC, more.scores_BC], dim=1),
            torch.cat([self.parents_BC, more.parents_BC], dim=1),
            torch.cat([self.exists_BC, more.exists_BC], dim=1),
        )


@dataclass(frozen=True)
class Selection:
    """The best first, so that the first n nodes are the tree of n nodes: no child comes before its
    parent."""

    tokens_BN: Tensor  # int64, the root first; 0 past the last node
    parents_BN: Tensor  # int64, index among the nodes; the root's is -1
    candidates_BM: Tensor  # int64, which candidate each node but the root is; C past the last


def best(scores_BC: Tensor, count: int) -> Tensor:
    """int64 [B, count], the indices of the best, best first."""
    return scores_BC.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def select(roots_B1: Tensor, candidates: Candidates, num_nodes: list[int]) -> Selection:
    """The root and the best candidates, so many in all of each request; at least 1, and no more
    than there are. Of these, those that exist: others do not move up in place of the rest, for a
    sampled tree would then depend on what was drawn. Since no child outdoes its parent, the parents
    of what is kept are kept."""
    most, device = max(num_nodes) - 1, roots_B1.device
    batch_size, count = candidates.tokens_BC.shape
    wanted_B1 = sent(torch.tensor(num_nodes), device)[:, None] - 1
    order_BM = best(candidates.scores_BC, most)
    beyond = torch.arange(most, device=device) >= wanted_B1
    missing = beyond | ~candidates.exists_BC.gather(1, order_BM)
    chosen_BM = order_BM.masked_fill(missing, count)
    chosen_BM = chosen_BM.gather(1, missing.byte().argsort(dim=-1, stable=True))
    # One place before all candidates for the root, which is -1 among parents, and one after
    # them for what was not chosen.
    node_of = roots_B1.new_zeros(batch_size, count + 2)
    nodes_M = torch.arange(1, most + 1, device=device)
    node_of.scatter_(1, chosen_BM + 1, nodes_M.expand_as(chosen_BM))
    parents_BM = pad(candidates.parents_BC, (0, 1)).gather(1, chosen_BM)
    tokens_BM = pad(candidates.tokens_BC, (0, 1)).gather(1, chosen_BM)
    return Selection(
        tokens_BN=torch.cat([roots_B1, tokens_BM], dim=1),
        parents_BN=pad(node_of.gather(1, parents_BM + 1), (1, 0), value=-1),
        candidates_BM=chosen_BM,
    )
