"""Log-probabilities of chosen tokens under the model's raw distribution."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.core.request import TokenLogprob
from specengine.layers.logits import row_chunks


def token_logprobs(
    logits_RV: Tensor, rows_M: Tensor, tokens_M: Tensor, num_top: list[int]
) -> list[TokenLogprob]:
    """Logprob of tokens[m], and the num_top[m] best tokens, in row rows[m] of the logits.

    logits_RV: raw float32 logits, before any sampling parameter. rows_M, tokens_M: int64, on the
    same device. Everything crosses to the host at once.
    """
    if not num_top:
        return []
    most = min(max(num_top), logits_RV.shape[-1])
    packed = [
        pack_logprobs(logits_RV[rows_M[part]], tokens_M[part], most)
        for part in row_chunks(len(num_top), logits_RV.shape[-1])
    ]
    return unpack_logprobs(torch.cat(packed).tolist(), num_top)


def unpack_logprobs(table: list[list[float]], num_top: list[int]) -> list[TokenLogprob]:
    """Logprobs from rows that pack_logprobs made, with as many alternatives as were asked for."""
    return [
        TokenLogprob(
            token=int(row[0]),
            logprob=row[1],
            top=[(int(t), p) for t, p in zip(row[2 : 2 + count], row[most:], strict=False)],
        )
        for row, count in zip(table, num_top, strict=True)
        for most in [1 + len(row) // 2]
    ]


def pack_logprobs(logits: Tensor, tokens: Tensor, most: int) -> Tensor:
    """float64 [R, 2 + 2 * most]: token, its logprob, best tokens, their logprobs. A float64 holds
    any token id exactly."""
    norm = logits.logsumexp(-1, keepdim=True)
    chosen = logits.gather(1, tokens[:, None]) - norm
    best = logits.topk(most)
    columns = [tokens[:, None], chosen, best.indices, best.values - norm]
    return torch.cat([column.double() for column in columns], dim=1)
