"""Routing in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specengine.kernels.experts.types import Chosen, Router, Routing


def route(x: Tensor, router: Router, routing: Routing) -> Chosen:
    logits_TE = F.linear(x, router.weight, router.bias).float()
    return choose(logits_TE, router.correction, routing)


def choose(logits_TE: Tensor, correction_E: Tensor | None, routing: Routing) -> Chosen:
    """`route` from float32 logits [T, E]."""
    scores_TE = logits_TE.softmax(-1) if routing.scores == "softmax" else logits_TE.sigmoid()
    ranks_TE = scores_TE if correction_E is None else scores_TE + correction_E
    if routing.num_groups > 1:
        ranks_TE = _within_groups(ranks_TE, routing)
    order = torch.sort(ranks_TE, dim=-1, descending=True, stable=True).indices
    ids_TK = order[:, : routing.num_chosen]
    weights_TK = scores_TE.gather(1, ids_TK)
    if routing.normalised:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    return Chosen(ids_TK.int(), weights_TK * routing.scaling)


def _within_groups(ranks_TE: Tensor, routing: Routing) -> Tensor:
    """Ranks, -inf outside of the best groups."""
    groups_TGM = ranks_TE.view(len(ranks_TE), routing.num_groups, -1)
    best = groups_TGM.topk(min(routing.group_best, groups_TGM.shape[2]), dim=-1).values
    order = torch.sort(best.sum(-1), dim=-1, descending=True, stable=True).indices
    chosen_TG = torch.zeros_like(order, dtype=torch.bool)
    chosen_TG.scatter_(1, order[:, : routing.num_chosen_groups], True)
    kept_TGM = groups_TGM.masked_fill(~chosen_TG[:, :, None], float("-inf"))
    return kept_TGM.view(ranks_TE.shape)
