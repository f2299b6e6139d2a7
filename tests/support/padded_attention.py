"""Paged attention of all requests at once, for engines that fly on a CPU: of lengths that tensors
alone know, as the reference's, which takes a request at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specengine.kernels.attention.types import PagedBatch


@dataclass(frozen=True)
class Reading:
    """What each query of a batch may see: the same in all layers of a forward that have the same
    window."""

    slots_BK: Tensor
    visible_BNK: Tensor  # bool
    is_even: bool  # as many queries of each request
    rows_BN: Tensor  # of queries, past the last where a request has fewer; unread where it is even
    shape: tuple[int, int]  # requests, and most queries of one


def read(batch: PagedBatch, total: int, window: int | None) -> Reading:
    """total: queries of all requests."""
    device = batch.seq_lens.device
    starts_B, counts_B = batch.qo_indptr[:-1], batch.qo_indptr.diff()
    requests, num_queries = len(starts_B), int(counts_B.max())
    if num_queries == 0:
        return Reading(starts_B, starts_B, True, starts_B, (requests, 0))
    num_keys = int(batch.seq_lens.max())
    keys_K, queries_N = (torch.arange(n, device=device) for n in (num_keys, num_queries))
    # Drafts of a round on the device may lie past the context; they lie in slot 0.
    width = batch.req_to_token.shape[1]
    slots_BK = batch.req_to_token[batch.req_pool_indices, :num_keys]
    if num_keys > width:
        slots_BK = torch.nn.functional.pad(slots_BK, (0, num_keys - width))
    exists_BK = keys_K < batch.seq_lens[:, None]
    slots_BK = slots_BK.where(exists_BK, slots_BK[:, :1])
    prefix_B11 = (batch.seq_lens - counts_B)[:, None, None]
    visible_BNK = _visible(batch, keys_K, queries_N, prefix_B11) & exists_BK[:, None]
    is_even = int(batch.qo_indptr[-1]) == requests * num_queries
    rows_BN = queries_N
    if window is not None or not is_even:
        rows_BN = starts_B[:, None] + queries_N
    if window is not None:
        rows = rows_BN.clamp(max=total - 1)
        visible_BNK &= _near(batch, keys_K, queries_N, rows, prefix_B11, window)
    if not is_even:
        rows_BN = rows_BN.where(queries_N < counts_B[:, None], total)
    return Reading(slots_BK, visible_BNK, is_even, rows_BN, (requests, num_queries))


def padded_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    reading: Reading | None = None,
) -> Tensor:
    """As kernels/attention/paged_attention.py has it. reading: of this batch and window, if
    known."""
    total, heads, size = q.shape
    one = read(batch, total, window) if reading is None else reading
    requests, num_queries = one.shape
    if num_queries == 0:
        return torch.empty_like(q)
    count = requests * num_queries
    taken = q[:count] if one.is_even else q[one.rows_BN.clamp(max=total - 1)]
    shape = (requests, num_queries, k_cache.shape[1], -1, size)  # [B, N, Hk, group, D]
    q_BHGND = taken.float().view(shape).permute(0, 2, 3, 1, 4)
    k_BHKD = k_cache[one.slots_BK].float().transpose(1, 2)
    v_BHKD = v_cache[one.slots_BK].float().transpose(1, 2)
    given = q_BHGND, k_BHKD, v_BHKD, one.visible_BNK[:, None, None], scale
    if softcap is None and sinks is None:
        heads_BHGND = _attend(*given)
    else:
        heads_BHGND = _attend_capped(*given, softcap, sinks)
    found = heads_BHGND.permute(0, 3, 1, 2, 4).reshape(requests, num_queries, heads, -1)
    if one.is_even and count == total:
        return found.flatten(0, 1).to(q.dtype)
    out = torch.empty(total + 1, *found.shape[2:], dtype=q.dtype, device=q.device)
    if one.is_even:
        out[:count] = found.flatten(0, 1)
    else:
        out[one.rows_BN] = found.to(q.dtype)
    return out[:total]


def _attend(
    q_BHGND: Tensor, k_BHKD: Tensor, v_BHKD: Tensor, visible_B11NK: Tensor, scale: float
) -> Tensor:
    """[B, Hk, group, N, width of values]."""
    visible = visible_B11NK.expand(-1, -1, q_BHGND.shape[2], -1, -1).flatten(2, 3)
    taken = q_BHGND.flatten(2, 3), k_BHKD, v_BHKD
    found = torch.nn.functional.scaled_dot_product_attention(*taken, visible, scale=scale)
    return found.view(*q_BHGND.shape[:4], -1)


def _attend_capped(
    q_BHGND: Tensor,
    k_BHKD: Tensor,
    v_BHKD: Tensor,
    visible_B11NK: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """As _attend, step by step."""
    scores = q_BHGND.flatten(2, 3) @ k_BHKD.transpose(2, 3) * scale
    scores = scores.view(*q_BHGND.shape[:4], -1)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible_B11NK, float("-inf"))
    if sinks is not None:
        beside = sinks.float().view(1, *scores.shape[1:3], 1, 1).expand(*scores.shape[:4], 1)
        scores = torch.cat((scores, beside), -1)
    weights = scores.softmax(-1)[..., : k_BHKD.shape[2]]
    return (weights.flatten(2, 3) @ v_BHKD).view(*q_BHGND.shape[:4], -1)


def _visible(batch: PagedBatch, keys_K: Tensor, queries_N: Tensor, prefix_B11: Tensor) -> Tensor:
    """bool [B, N, K], of keys that exist."""
    if batch.tree_mask is None:
        visible = keys_K <= prefix_B11 + queries_N[:, None]
    else:
        first_B11, of_B11 = prefix_B11 - batch.num_past, torch.arange(len(prefix_B11))
        among_B1K = (keys_K - first_B11).clamp(0, batch.tree_mask.shape[2] - 1)
        nodes_N1 = queries_N.clamp(max=batch.tree_mask.shape[1] - 1)[:, None]
        chosen = batch.tree_mask[of_B11.to(keys_K.device)[:, None, None], nodes_N1, among_B1K]
        visible = (keys_K < first_B11) | chosen
    if batch.first_keys is None:
        return visible
    first_keys_B11 = batch.first_keys[batch.req_pool_indices][:, None, None]
    return visible & (keys_K >= first_keys_B11.minimum(prefix_B11))


def _near(
    batch: PagedBatch,
    keys_K: Tensor,
    queries_N: Tensor,
    rows_BN: Tensor,
    prefix_B11: Tensor,
    window: int,
) -> Tensor:
    """bool [B, N, K]: within the window, or a node of the past."""
    if batch.tree_mask is None:
        return keys_K > prefix_B11 + queries_N[:, None] - window
    drafted_B1K = (keys_K - prefix_B11).clamp(0, len(queries_N) - 1)
    positions_BN = batch.positions[rows_BN]
    depths_B1K = positions_BN[:, None].gather(2, drafted_B1K)
    places_B1K = depths_B1K.where(keys_K >= prefix_B11, keys_K)
    past_B1K = (keys_K >= prefix_B11 - batch.num_past) & (keys_K < prefix_B11)
    return (places_B1K > positions_BN[:, :, None] - window) | past_B1K
