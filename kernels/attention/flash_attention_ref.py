"""FlashAttention's function in plain PyTorch, a request at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.kernels.attention.flash_merge import beside_sinks
from specengine.kernels.attention.types import FlashKeys, FlashOutput


def flash_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    keys: FlashKeys,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> FlashOutput:
    group = q.shape[1] // k_cache.shape[1]
    out = torch.zeros_like(q)
    lse = torch.full((q.shape[1], q.shape[0]), float("-inf"), device=q.device)
    bounds = keys.qo_indptr.tolist()
    for b, count in enumerate(keys.seq_lens.tolist()):
        begin, end = bounds[b], bounds[b + 1]
        if begin == end or count == 0:
            continue
        row = b if keys.rows is None else int(keys.rows[b])
        slots = keys.table[row, :count].long()
        k = k_cache[slots].float().repeat_interleave(group, 1)
        v = v_cache[slots].float().repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].float(), k) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        behind = torch.arange(end - begin).add(count - (end - begin))[:, None] - torch.arange(count)
        if keys.causal:
            scores.masked_fill_((behind < 0).to(q.device), float("-inf"))
        if window is not None:
            scores.masked_fill_((behind >= window).to(q.device), float("-inf"))
        lse[:, begin:end] = scores.logsumexp(-1)
        out[begin:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(q.dtype)
    return beside_sinks(FlashOutput(out, lse), sinks)
