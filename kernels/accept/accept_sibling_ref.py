"""Recursive rejection in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.kernels.accept.accept_rejection_ref import accept_chance, residual
from specengine.kernels.accept.accept_sampled_ref import Pick, Verdict, stands
from specengine.kernels.accept.types import SampledRound


def scaled(weights: Tensor, otherwise: Tensor) -> Tensor:
    """Weights [B, V] to a sum of 1; `otherwise` where there is nothing to scale."""
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total, otherwise)


class Contest:
    """What the siblings below one node have left of the target, while they are rejected."""

    def __init__(self, target_BV: Tensor) -> None:
        self.target_BV = target_BV  # float64
        self._taken_BV = torch.zeros_like(target_BV, dtype=torch.bool)

    def draft(self, draft_BV: Tensor) -> Tensor:
        """A sibling's row without the tokens of those before it: what its own was drawn from."""
        left_BV = draft_BV.masked_fill(self._taken_BV, 0.0)
        return scaled(left_BV, otherwise=left_BV)

    def reject(self, draft_BV: Tensor, tokens_B: Tensor, where_B: Tensor) -> None:
        """The target gives away what the draft covered; the token cannot be drawn again."""
        left_BV = scaled(residual(self.target_BV, draft_BV), otherwise=self.target_BV)
        self.target_BV = torch.where(where_B[:, None], left_BV, self.target_BV)
        taken_BV = self._taken_BV.scatter(1, tokens_B[:, None], True)
        self._taken_BV = torch.where(where_B[:, None], taken_BV, self._taken_BV)


def judge(drafts: SampledRound, pick: Pick) -> Verdict:
    """How tall and how wide the trees are is asked for first: the host waits for the device."""
    ranks_BN = _ranks(drafts)
    height, last_rank = torch.stack([drafts.depths_BN.max(), ranks_BN.max()]).tolist()
    children_BNK = _children(drafts, ranks_BN, last_rank + 1)
    requests = torch.arange(len(ranks_BN), device=ranks_BN.device)
    ends_B = torch.zeros_like(drafts.roots_B)
    for _ in range(max(1, height)):
        # Where the path has ended, the same coins end it here again.
        children_BK = children_BNK[requests, ends_B]
        contest = Contest(drafts.target(ends_B))
        ends_B = _descend(contest, drafts, pick, ends_B, children_BK)
    return Verdict(ends_B, contest.target_BV)


def _descend(
    contest: Contest, drafts: SampledRound, pick: Pick, ends_B: Tensor, children_BK: Tensor
) -> Tensor:
    """int64 [B], the accepted child, or the node itself."""
    next_B = ends_B
    for child_B in children_BK.unbind(1):
        offered_B = (child_B > 0) & (next_B == ends_B)
        tokens_B = drafts.tokens_BN.gather(1, child_B[:, None]).squeeze(1)
        draft_BV = contest.draft(drafts.draft(child_B))
        pair = (x.gather(1, tokens_B[:, None]) for x in (contest.target_BV, draft_BV))
        chance_B1 = accept_chance(*pair).where(offered_B[:, None], 0.0)
        stands_B = stands(pick, chance_B1, child_B[:, None]).squeeze(1)
        next_B = torch.where(stands_B, child_B, next_B)
        contest.reject(draft_BV, tokens_B, offered_B & ~stands_B)
    return next_B


def _ranks(drafts: SampledRound) -> Tensor:
    """int64 [B, N], how many siblings come before each node; 0 for the root and for nodes that do
    not exist."""
    below_BN = drafts.depths_BN > 0
    same_BNN = drafts.parents_BN[:, :, None] == drafts.parents_BN[:, None, :]
    same_BNN &= below_BN[:, :, None] & below_BN[:, None, :]
    return same_BNN.tril(-1).sum(-1)


def _children(drafts: SampledRound, ranks_BN: Tensor, most: int) -> Tensor:
    """int64 [B, N, K], the children of each node in order, then 0."""
    batch, width = ranks_BN.shape
    nodes_BN = drafts.nodes().masked_fill(drafts.depths_BN <= 0, 0)
    children = ranks_BN.new_zeros(batch, width * most)
    children.scatter_add_(1, drafts.parents_BN * most + ranks_BN, nodes_BN)
    return children.view(batch, width, most)
