"""What ranks find in their parts of the logits, put together: as if one had seen them all."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from specengine.core.parallel import VocabularyCut
from specengine.kernels.head.head_topk_ref import keys_of
from specengine.kernels.head.types import BlockPartials

_NOTHING = float("-inf")


def joined(logits_RL: Tensor, tokens: VocabularyCut) -> Tensor:
    """[R, L], this rank's columns -> [R, V] on every rank, in the same dtype."""
    if tokens.is_whole:
        return logits_RL
    missing = tokens.width - tokens.cut.size
    if missing:
        logits_RL = F.pad(logits_RL, (0, missing), value=_NOTHING)
    columns_RSL = tokens.ranks.all_gather(logits_RL).transpose(0, 1)
    # Only the last part is padded, so that padding comes behind all tokens.
    return columns_RSL.flatten(1)[:, : tokens.cut.whole].contiguous()


def best(logits_RL: Tensor, tokens: VocabularyCut, ids: Tensor | None = None) -> Tensor:
    """[R, L] -> int64 [R], the token of the largest logit, the first among equals, and its number
    in `ids` if given. Ranks exchange a logit and a token a row."""
    found = logits_RL.float().max(dim=-1)
    # Exact: a float32, and a token below 2^53.
    pair_R2 = torch.stack([found.values.double(), (found.indices + tokens.cut.start).double()], -1)
    pairs_SR2 = tokens.ranks.all_gather(pair_R2)
    first_1R1 = pairs_SR2[..., :1].argmax(dim=0, keepdim=True)
    best_R = pairs_SR2[..., 1:].gather(0, first_1R1).flatten().long()
    return best_R if ids is None else ids[best_R]


def top(logits_RL: Tensor, tokens: VocabularyCut, topk: int) -> BlockPartials:
    """[R, L] -> the topk best of each row and its log-sum-exp, a block a rank."""
    logits_RL = logits_RL.float()
    cut = tokens.cut
    columns_L = torch.arange(cut.start, cut.stop, device=logits_RL.device)
    count = min(topk, cut.size)
    keys_RK = keys_of(logits_RL, columns_L).topk(count, dim=-1).values
    keys_RK = keys_RK if count == topk else F.pad(keys_RK, (0, topk - count))
    largest_R1 = logits_RL.amax(-1, keepdim=True)
    base_R1 = largest_R1.where(largest_R1 > _NOTHING, 0.0)
    sums_R1 = (logits_RL - base_R1).exp().sum(-1, keepdim=True)
    sums_R2 = torch.cat([largest_R1, sums_R1], dim=-1)
    keys_RSK = tokens.ranks.all_gather(keys_RK).transpose(0, 1).contiguous()
    sums_RS2 = tokens.ranks.all_gather(sums_R2).transpose(0, 1).contiguous()
    return BlockPartials(keys_RSK, sums_RS2, tokens.width)
