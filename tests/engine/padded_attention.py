"""Paged attention of all requests at once, for engines that fly on a CPU: of lengths that tensors
alone know, as the reference's, which takes a request at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.kernels.paged_attention import PagedBatch


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, scale: float, window: int | None
) -> Tensor:
    """As kernels/paged_attention.py has it."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    starts_B, counts_B = batch.qo_indptr[:-1], batch.qo_indptr.diff()
    num_queries, num_keys = int(counts_B.max()), int(batch.seq_lens.max())
    if num_queries == 0:
        return out
    keys_K, queries_N = (torch.arange(n, device=q.device) for n in (num_keys, num_queries))
    exists_BK, asks_BN = keys_K < batch.seq_lens[:, None], queries_N < counts_B[:, None]
    rows_BN = (starts_B[:, None] + queries_N).where(asks_BN, 0)
    # Drafts of a round on the device may lie past the context; they stand in nobody's slot.
    width = batch.req_to_token.shape[1]
    table_BK = batch.req_to_token[batch.req_pool_indices][:, keys_K.clamp(max=width - 1)]
    table_BK = table_BK.where(keys_K < width, 0)
    slots_BK = table_BK.where(exists_BK, table_BK[:, :1]).long()
    visible_BNK = _visible(batch, keys_K, queries_N, rows_BN, window) & exists_BK[:, None]
    group = q.shape[1] // k_cache.shape[1]
    k_BHDK = k_cache[slots_BK].float().repeat_interleave(group, 2).permute(0, 2, 3, 1)
    v_BHKD = v_cache[slots_BK].float().repeat_interleave(group, 2).transpose(1, 2)
    scores_BHNK = q[rows_BN].float().transpose(1, 2) @ k_BHDK * scale
    weights_BHNK = scores_BHNK.masked_fill(~visible_BNK[:, None], float("-inf")).softmax(-1)
    out[rows_BN[asks_BN]] = (weights_BHNK @ v_BHKD).transpose(1, 2)[asks_BN].to(q.dtype)
    return out


def _visible(
    batch: PagedBatch, keys_K: Tensor, queries_N: Tensor, rows_BN: Tensor, window: int | None
) -> Tensor:
    """bool [B, N, K], of keys that exist."""
    prefix_B11 = (batch.seq_lens - batch.qo_indptr.diff())[:, None, None]
    first_B11 = prefix_B11 - batch.num_past
    of_B11 = torch.arange(len(rows_BN), device=rows_BN.device)[:, None, None]
    own_BN1 = (prefix_B11[:, 0] + queries_N)[:, :, None]
    place_B1K = keys_K.expand(len(rows_BN), 1, -1)
    if batch.tree_mask is None:
        visible = keys_K <= own_BN1
    else:
        among_B1K = (keys_K - first_B11).clamp(0, batch.tree_mask.shape[2] - 1)
        nodes_N1 = queries_N.clamp(max=batch.tree_mask.shape[1] - 1)[:, None]
        visible = (keys_K < first_B11) | batch.tree_mask[of_B11, nodes_N1, among_B1K]
        drafted_B1K = (keys_K - prefix_B11).clamp(0, rows_BN.shape[1] - 1)
        positions_BN = batch.positions[rows_BN]
        own_BN1 = positions_BN[:, :, None]
        depths_B1K = positions_BN[:, None].gather(2, drafted_B1K)
        place_B1K = depths_B1K.where(keys_K >= prefix_B11, place_B1K)
    if batch.first_keys is not None:
        first_keys_B11 = batch.first_keys[batch.req_pool_indices][:, None, None]
        visible = visible & (keys_K >= first_keys_B11.minimum(prefix_B11))
    if window is not None:
        past_B1K = (keys_K >= first_B11) & (keys_K < prefix_B11)
        visible = visible & ((place_B1K > own_BN1 - window) | past_B1K)
    return visible
