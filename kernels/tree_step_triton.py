"""One level of a draft tree's growth in Triton: programs share the rows of logits, and the last to
arrive of each request chooses."""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specengine.kernels.tree_step import Beams, Found

_MIN_SHARE, _MAX_SHARES = 1024, 32  # columns of one program; programs of one row


@triton.jit
def ordered_key(x, index):
    """int64 above 0 that orders as x float32 does, and prefers the first index among equals."""
    bits = (x + 0.0).to(tl.int32, bitcast=True).to(tl.int64)
    ordered = tl.where(bits < 0, -1 - bits, bits + 0x80000000)
    return (ordered << 31) | (0x7FFFFFFF - index.to(tl.int64))


@triton.jit
def key_index(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF)


@triton.jit
def key_value(key):
    ordered = key >> 31
    bits = tl.where(ordered >= 0x80000000, ordered - 0x80000000, -1 - ordered)
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _share_of_row(logits_ptr, keys_ptr, sums_ptr, num_cols, K: tl.constexpr, BLOCK: tl.constexpr):
    """Leave the K best keys, the maximum and the sum of exponentials of this program's columns."""
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < num_cols
    x = tl.load(logits_ptr + cols, mask=inside, other=float("-inf")).to(tl.float32)
    largest = tl.max(x, 0)
    finite = tl.where(largest == float("-inf"), 0.0, largest)
    tl.store(sums_ptr, finite)
    tl.store(sums_ptr + 1, tl.sum(tl.exp(x - finite), 0))
    keys = tl.where(inside, ordered_key(x, cols), -1)
    for k in range(K):
        best = tl.max(keys, 0)
        keys = tl.where(keys == best, -1, keys)
        tl.store(keys_ptr + k, best)


@triton.jit
def _log_sums(sums_ptr, rows, valid, shares, SHARES: tl.constexpr):
    """Log-sum-exp of each row, of what its shares left."""
    places = tl.arange(0, SHARES)
    cells = sums_ptr + (rows[:, None] * shares + places[None, :]) * 2
    mask = valid[:, None] & (places < shares)[None, :]
    largest = tl.load(cells, mask=mask, other=float("-inf"), cache_modifier=".cg")
    sums = tl.load(cells + 1, mask=mask, other=0.0, cache_modifier=".cg")
    top = tl.max(largest, 1)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(sums * tl.exp(largest - top[:, None]), 1)
    return top + tl.log(tl.where(valid, total, 1.0))


@triton.jit
def _tree_step_kernel(
    logits_ptr,
    ids_ptr,
    ranks_ptr,
    old_scores_ptr,
    old_candidates_ptr,
    old_mask_ptr,
    tokens_ptr,
    scores_ptr,
    parents_ptr,
    beam_tokens_ptr,
    beam_scores_ptr,
    beam_candidates_ptr,
    above_ptr,
    depths_ptr,
    mask_ptr,
    keys_ptr,
    sums_ptr,
    counters_ptr,
    num_cols,
    stride_logits,
    candidates,
    first,
    past,
    K: tl.constexpr,
    P: tl.constexpr,
    HAS_IDS: tl.constexpr,
    BY_RANK: tl.constexpr,
    IS_ROOT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_SHARES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_PAST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    shares = tl.num_programs(1)
    share = row * shares + tl.program_id(1)
    _share_of_row(
        logits_ptr + row * stride_logits,
        keys_ptr + share * K,
        sums_ptr + share * 2,
        num_cols,
        K,
        BLOCK,
    )
    request = row // P
    # Every thread's stores must be out before the count says so.
    tl.debug_barrier()
    arrived = tl.atomic_add(counters_ptr + request, 1, sem="acq_rel", scope="gpu")
    if arrived != P * shares - 1:
        return
    tl.store(counters_ptr + request, 0)

    beams = tl.arange(0, BLOCK_P)
    is_beam = beams < P
    rows = request * P + beams
    places = tl.arange(0, BLOCK_KEYS)
    # Written by other multiprocessors: not to be read through this one's first-level cache.
    keys = tl.load(
        keys_ptr + (rows * (shares * K))[:, None] + places[None, :],
        mask=is_beam[:, None] & (places < shares * K)[None, :],
        other=-1,
        cache_modifier=".cg",
    )
    path_scores = tl.zeros([BLOCK_P], tl.float32)
    parents = tl.full([BLOCK_P], -1, tl.int64)
    if not IS_ROOT:
        path_scores = tl.load(old_scores_ptr + request * K + beams, mask=is_beam, other=0.0)
        parents = tl.load(old_candidates_ptr + request * K + beams, mask=is_beam, other=0)
    if not BY_RANK:
        log_sums = _log_sums(sums_ptr, rows, is_beam, shares, BLOCK_SHARES)

    ranks = tl.arange(0, BLOCK_K)
    index = beams[:, None] * K + ranks[None, :]
    new = tl.full([BLOCK_P, BLOCK_K], -1, tl.int64)
    new_tokens = tl.zeros([BLOCK_P, BLOCK_K], tl.int64)
    for k in range(K):
        best = tl.max(keys, 1)
        keys = tl.where(keys == best[:, None], -1, keys)
        token = key_index(best)
        if HAS_IDS:
            token = tl.load(ids_ptr + token, mask=is_beam, other=0)
        if BY_RANK:
            score = path_scores + tl.load(ranks_ptr + k)
        else:
            score = path_scores + tl.minimum(key_value(best) - log_sums, 0.0)
        place = request * candidates + first + beams * K + k
        tl.store(tokens_ptr + place, token, mask=is_beam)
        tl.store(scores_ptr + place, score, mask=is_beam)
        tl.store(parents_ptr + place, parents, mask=is_beam)
        here = (ranks == k)[None, :] & is_beam[:, None]
        new = tl.where(here, ordered_key(score, beams * K + k)[:, None], new)
        new_tokens = tl.where(here, token[:, None], new_tokens)

    width = past + K
    nodes = tl.arange(0, BLOCK_PAST)
    for k in range(K):
        best = tl.max(tl.max(new, 1), 0)
        new = tl.where(new == best, -1, new)
        picked = key_index(best)
        above = picked // K
        place = request * K + k
        token = tl.sum(tl.sum(tl.where(index == picked, new_tokens, 0), 1), 0)
        tl.store(beam_tokens_ptr + place, token)
        tl.store(beam_scores_ptr + place, key_value(best))
        tl.store(beam_candidates_ptr + place, first + picked)
        tl.store(above_ptr + place, request * P + above)
        tl.store(depths_ptr + place, (past // K).to(tl.int64))
        seen = (nodes == past + k).to(tl.uint8)
        if not IS_ROOT:
            old = old_mask_ptr + (request * K + above) * past + nodes
            seen = tl.where(nodes < past, tl.load(old, mask=nodes < past, other=0), seen)
        tl.store(mask_ptr + place * width + nodes, seen, mask=nodes < width)


def tree_step(
    logits_TV: Tensor,
    beams: Beams | None,
    found: Found,
    topk: int,
    counters: Tensor,
    ids: Tensor | None,
    rank_scores: Tensor | None,
) -> Beams:
    batch_size, candidates = found.tokens_BC.shape
    num_cols = logits_TV.shape[1]
    per_request = 1 if beams is None else topk
    past = 0 if beams is None else beams.mask_BKN.shape[2]
    new = _empty_beams(batch_size, topk, past, logits_TV.device)
    block = max(_MIN_SHARE, triton.next_power_of_2(triton.cdiv(num_cols, _MAX_SHARES)))
    shares = triton.cdiv(num_cols, block)
    rows = batch_size * per_request
    keys = torch.empty(rows * shares * topk, dtype=torch.int64, device=logits_TV.device)
    sums = torch.empty(rows * shares * 2, dtype=torch.float32, device=logits_TV.device)
    old = new if beams is None else beams
    _tree_step_kernel[(rows, shares)](
        logits_TV,
        logits_TV if ids is None else ids,
        logits_TV if rank_scores is None else rank_scores,
        old.scores_BK,
        old.candidates_BK,
        old.mask_BKN.view(torch.uint8),
        found.tokens_BC,
        found.scores_BC,
        found.parents_BC,
        new.tokens_BK,
        new.scores_BK,
        new.candidates_BK,
        new.above_T,
        new.depths_T,
        new.mask_BKN.view(torch.uint8),
        keys,
        sums,
        counters,
        num_cols,
        logits_TV.stride(0),
        candidates,
        0 if beams is None else topk + (past // topk - 1) * topk**2,
        past,
        K=topk,
        P=per_request,
        HAS_IDS=ids is not None,
        BY_RANK=rank_scores is not None,
        IS_ROOT=beams is None,
        BLOCK=block,
        BLOCK_K=triton.next_power_of_2(topk),
        BLOCK_P=triton.next_power_of_2(per_request),
        BLOCK_SHARES=triton.next_power_of_2(shares),
        BLOCK_KEYS=triton.next_power_of_2(shares * topk),
        BLOCK_PAST=triton.next_power_of_2(past + topk),
        num_warps=4,
    )
    return new


def _empty_beams(batch_size: int, topk: int, past: int, device: torch.device) -> Beams:
    tokens = torch.empty(batch_size, topk, dtype=torch.int64, device=device)
    above = torch.empty(batch_size * topk, dtype=torch.int64, device=device)
    return Beams(
        tokens_BK=tokens,
        scores_BK=torch.empty(batch_size, topk, dtype=torch.float32, device=device),
        candidates_BK=torch.empty_like(tokens),
        above_T=above,
        depths_T=torch.empty_like(above),
        mask_BKN=torch.empty(batch_size, topk, past + topk, dtype=torch.bool, device=device),
    )
