"""Target-only acceptance in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.kernels.accept.accept_coins_ref import end_of_path
from specengine.kernels.accept.accept_sampled_ref import Pick, Verdict
from specengine.kernels.accept.types import SampledRound


def judge(drafts: SampledRound, pick: Pick) -> Verdict:
    return verdict_at(drafts, end_of_path(pick(child_chances(drafts), drafts.nodes())))


def child_chances(drafts: SampledRound) -> Tensor:
    """float64 [B, N, N], of the child (column) of a node (row), 0 where it is not its child."""
    is_child_BNN = drafts.parents_BN[:, None, :] == drafts.nodes()[:, :, None]
    is_child_BNN &= (drafts.depths_BN > 0)[:, None, :]
    return drafts.target_of_tokens()[:, None, :] * is_child_BNN


def verdict_at(drafts: SampledRound, ends_B: Tensor) -> Verdict:
    """What is left of the target is what it says beside the children's tokens."""
    target_BV = drafts.target(ends_B)
    hits_BV = torch.zeros_like(target_BV)
    hits_BV.scatter_add_(1, drafts.tokens_BN, drafts.children(ends_B).double())
    return Verdict(ends_B, target_BV.masked_fill(hits_BV > 0, 0.0))
