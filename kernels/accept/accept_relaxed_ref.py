"""Relaxed acceptance in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specengine.kernels.accept.accept_coins_ref import end_of_path
from specengine.kernels.accept.types import Accepted, RelaxedRound

_ROWS = 32  # handled at once, so that their float64 copies stay small


@dataclass(frozen=True)
class Bar:
    """What tokens of each row are held against."""

    best_T: Tensor  # float64, the largest logit
    kth_T: Tensor  # float64, the k-th largest
    total_T: Tensor  # float64, exponentials of what logits have to the largest


def accept_relaxed(drafts: RelaxedRound, top_k: int, delta: float) -> Accepted:
    width = drafts.tokens_BN.shape[1]
    nodes_N = torch.arange(width, device=drafts.tokens_BN.device)
    is_below_BN = (nodes_N > 0) & (nodes_N < drafts.counts_B[:, None])
    parents_BN = drafts.parents_BN.where(is_below_BN, 0)
    rows_BN = drafts.roots_B[:, None] + parents_BN
    is_said_BN = is_below_BN & (drafts.tokens_BN == drafts.chosen_T[rows_BN])
    is_fair_BN = is_below_BN & _fair(drafts, rows_BN, top_k, delta)
    is_child_BNN = parents_BN[:, None, :] == nodes_N[:, None]
    # A child that is said comes before one that is fair, and the first of equals before others.
    merit_BNN = is_child_BNN * torch.where(is_said_BN, 2, is_fair_BN.long())[:, None, :]
    best_BN, child_BN = merit_BNN.max(-1).values, merit_BNN.argmax(-1)
    ends_B = end_of_path(child_BN.where(best_BN > 0, width))
    return Accepted(ends_B, drafts.chosen_T[drafts.roots_B + ends_B])


def _fair(drafts: RelaxedRound, rows_BN: Tensor, top_k: int, delta: float) -> Tensor:
    """bool [B, N]: the token of each node, after its parent's row; meaningless where there is no
    such node."""
    vocab = drafts.logits_TV.shape[1]
    tokens_BN = drafts.tokens_BN.clamp(0, vocab - 1)
    logits_BN = drafts.logits_TV[rows_BN, tokens_BN].double()
    bar = _bar(drafts.logits_TV, min(top_k, vocab))
    total_BN = bar.total_T[rows_BN]
    # Where all is forbidden this is NaN, and nothing is fair.
    probs_BN = (logits_BN - bar.best_T[rows_BN]).exp() / total_BN
    lowest = float(torch.tensor(delta, dtype=torch.float32))
    is_near = (probs_BN > 0) & (probs_BN >= 1 / total_BN - lowest)
    return is_near & (logits_BN >= bar.kth_T[rows_BN]) & (tokens_BN == drafts.tokens_BN)


def _bar(logits_TV: Tensor, top_k: int) -> Bar:
    parts = []
    for rows_RV in torch.split(logits_TV, _ROWS):
        best_RK = rows_RV.topk(top_k).values.double()
        total_R = (rows_RV.double() - best_RK[:, :1]).exp_().sum(-1)
        parts.append(torch.stack([best_RK[:, 0], best_RK[:, -1], total_R]))
    return Bar(*torch.cat(parts, dim=1))
