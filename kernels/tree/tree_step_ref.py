"""One level of a draft tree's growth, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.kernels.head.types import BlockPartials
from specengine.kernels.tree.types import Beams, Drawn, Found


def tree_step(
    logits_TV: Tensor | BlockPartials,
    beams: Beams | None,
    found: Found,
    topk: int,
    ids: Tensor | None,
    rank_scores: Tensor | None,
    drawn: Drawn | None,
) -> Beams:
    batch_size = len(found.tokens_BC)
    past = 0 if beams is None else beams.mask_BKN.shape[2]
    first = 0 if beams is None else topk + (past // topk - 1) * topk**2
    columns_TK, scores_TK = _children(logits_TV, topk, rank_scores)
    rows = len(columns_TK) // batch_size
    tokens_TK = columns_TK if ids is None else ids[columns_TK]
    if drawn is not None:
        greedy_T1 = drawn.greedy_B.repeat_interleave(rows)[:, None]
        tokens_TK = tokens_TK.where(greedy_T1, drawn.tokens_TK)
        scores_TK = scores_TK.where(greedy_T1, drawn.scores_K)
    if beams is not None:
        scores_TK = scores_TK + beams.scores_BK.view(-1, 1)
    new = slice(first, first + rows * topk)
    found.tokens_BC[:, new] = tokens_TK.reshape(batch_size, -1)
    found.scores_BC[:, new] = scores_TK.reshape(batch_size, -1)
    found.parents_BC[:, new] = (
        -1 if beams is None else beams.candidates_BK.repeat_interleave(topk, dim=1)
    )
    picked_BK = _best(found.scores_BC[:, new], topk)
    above_BK = picked_BK // topk + rows * torch.arange(batch_size, device=picked_BK.device)[:, None]
    itself = torch.eye(topk, dtype=torch.bool, device=picked_BK.device).expand(batch_size, -1, -1)
    seen = itself[:, :, :0] if beams is None else beams.mask_BKN.flatten(0, 1)[above_BK]
    return Beams(
        tokens_BK=found.tokens_BC[:, new].gather(1, picked_BK),
        scores_BK=found.scores_BC[:, new].gather(1, picked_BK),
        candidates_BK=first + picked_BK,
        above_T=above_BK.flatten(),
        depths_T=torch.full_like(picked_BK.flatten(), past // topk),
        mask_BKN=torch.cat([seen, itself], dim=2),
    )


def _children(
    logits_TV: Tensor | BlockPartials, topk: int, rank_scores: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Columns, and scores given the parent, float32; [T, K] each."""
    if isinstance(logits_TV, BlockPartials):
        columns_TK, logits_TK = logits_TV.best()
        log_sums_T = logits_TV.log_sums()
    else:
        columns_TK = _best(logits_TV, topk)
        logits_TK = logits_TV.float().gather(1, columns_TK)
        log_sums_T = logits_TV.float().logsumexp(-1)
    if rank_scores is not None:
        return columns_TK, rank_scores.expand_as(columns_TK)
    return columns_TK, (logits_TK - log_sums_T[:, None]).clamp(max=0.0)


def _best(x: Tensor, count: int) -> Tensor:
    """int64 [..., count], the indices of the largest, the first among equals."""
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :count]
