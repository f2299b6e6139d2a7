"""Draft trees on the device, while they are expanded and when they are done."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Found:
    """Nodes found below the roots, level by level, siblings side by side and best first."""

    tokens_BC: Tensor  # int64
    scores_BC: Tensor  # float32, the logarithm of the path's probability, or what takes its place
    parents_BC: Tensor  # int64, index among the candidates; -1 is the root

    @classmethod
    def of(cls, batch_size: int, topk: int, num_steps: int, device: torch.device) -> Found:
        """Room for all that num_steps levels, at least 1, of topk branches find; uninitialised."""
        size = batch_size, topk + (num_steps - 1) * topk**2
        tokens = torch.empty(size, dtype=torch.int64, device=device)
        scores = torch.empty(size, dtype=torch.float32, device=device)
        return cls(tokens, scores, torch.empty_like(tokens))


@dataclass(frozen=True)
class Beams:
    """The K nodes of each request that are gone on with, best first."""

    tokens_BK: Tensor  # int64
    scores_BK: Tensor  # float32, of the whole path
    candidates_BK: Tensor  # int64, index among the nodes found
    above_T: Tensor  # int64 [B * K], the row of logits that each was found in
    depths_T: Tensor  # int64 [B * K], levels below the root's children
    mask_BKN: Tensor  # bool [B, K, M + K]: of the M beams of levels before, and these, its path


@dataclass(frozen=True)
class Drawn:
    """Children of each row that were drawn, for requests that want these and not the best."""

    tokens_TK: Tensor  # int64, of the target; -1 where there is none
    scores_K: Tensor  # float32, falling: they must not tell what was drawn
    greedy_B: Tensor  # bool, whose children are the best all the same


@dataclass(frozen=True)
class DraftTree:
    """N nodes a request, the root first, the others from the best to the worst: the first n are the
    tree of n nodes. No child comes before its parent."""

    tokens_BN: Tensor  # int64
    parents_BN: Tensor  # int64, index among the nodes; the root's is -1
    depths_BN: Tensor  # int64, the root has 0
    mask_BNN: Tensor  # bool, True where node i (row) is node j (column) or below it
    # int64, of limited trees: which of the nodes found each is; 0 for the root and what is missing
    candidates_BN: Tensor | None = None

    @classmethod
    def unset(cls, batch_size: int, num_nodes: int, device: torch.device) -> DraftTree:
        """For a kernel to fill."""
        tokens_BN = torch.empty(batch_size, num_nodes, dtype=torch.int64, device=device)
        parents_BN, depths_BN = torch.empty_like(tokens_BN), torch.empty_like(tokens_BN)
        size = batch_size, num_nodes, num_nodes
        mask_BNN = torch.empty(size, dtype=torch.bool, device=device)
        return cls(tokens_BN, parents_BN, depths_BN, mask_BNN)


@dataclass(frozen=True)
class TreeLimits:
    """What each request may have of its tree.

    nodes_B: int64, the most nodes, root included, at least 1. What lies so many levels deep counts
    as never found: there are no paths of more nodes. depths_B: int64; of what was chosen, nodes
    that lie deeper are left out, and those behind them move up; so are those without a token (below
    0), whose children have none.
    """

    topk: int  # children found of each node that was gone on with
    nodes_B: Tensor
    depths_B: Tensor

    def found_within(self, depths_B: Tensor, candidates: int) -> Tensor:
        """int64 [B], how many of so many candidates lie no deeper; they are the first."""
        found_B = self.topk + (depths_B - 1) * self.topk**2
        return found_B.clamp(max=candidates).where(depths_B > 0, 0)
