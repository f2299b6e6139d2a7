"""Paged attention in plain PyTorch, a request at a time."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from specengine.kernels.attention.types import PagedBatch
from specengine.kernels.kv.fp8_rows import read_rows


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    out = torch.empty(*q.shape[:2], v_cache.shape[2], dtype=q.dtype, device=q.device)
    group = q.shape[1] // k_cache.shape[1]
    indptr = batch.qo_indptr.tolist()
    for b, row in enumerate(batch.req_pool_indices.tolist()):
        rows = slice(indptr[b], indptr[b + 1])
        keys = int(batch.seq_lens[b])
        slots = batch.req_to_token[row, :keys].long()
        # Drafts of a round on the device may lie past the context; they lie in slot 0.
        slots = pad(slots, (0, keys - len(slots)))
        k = read_rows(k_cache, slots, torch.float32).repeat_interleave(group, 1)
        v = read_rows(v_cache, slots, torch.float32).repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q[rows].float(), k) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        visible = _visible(batch, b, rows, keys, window, chunk)
        weights = softmax_with_sinks(scores.masked_fill(~visible, float("-inf")), sinks)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
    return out


def softmax_with_sinks(scores_HQK: Tensor, sinks_H: Tensor | None) -> Tensor:
    """Over the last dimension; with a further logit for each head that takes its part."""
    if sinks_H is None:
        return scores_HQK.softmax(-1)
    beside_HQ1 = sinks_H.to(scores_HQK.dtype)[:, None, None].expand(-1, scores_HQK.shape[1], 1)
    return torch.cat((scores_HQK, beside_HQ1), -1).softmax(-1)[..., :-1]


def _visible(
    batch: PagedBatch, b: int, rows: slice, keys: int, window: int | None, chunk: int | None
) -> Tensor:
    """bool [n, keys]"""
    n = rows.stop - rows.start
    prefix = keys - n
    first = prefix - batch.num_past
    visible = torch.ones(n, keys, dtype=torch.bool, device=batch.seq_lens.device)
    if batch.tree_mask is None:
        visible = visible.tril(prefix)
        positions = torch.arange(keys, device=batch.seq_lens.device)
    else:
        visible[:, first:] = batch.tree_mask[b, :n, : keys - first]
        before = torch.arange(prefix, device=batch.seq_lens.device)
        positions = torch.cat((before, batch.positions[rows]))
    if batch.first_keys is not None:
        row = int(batch.req_pool_indices[b])
        visible[:, : min(int(batch.first_keys[row]), prefix)] = False
    own, back = positions[prefix:, None], None
    if window is not None:
        back = torch.full_like(own, window - 1)
    elif chunk is not None:
        back = own % chunk
    if back is not None:
        near = positions >= own - back
        near[:, first:prefix] = True
        visible &= near
    return visible
