"""One level of a draft tree's growth in Triton: programs share the rows of logits, and the last to
arrive of each request chooses. Where the head left BlockPartials, a program a request chooses."""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from specengine.kernels.dispatch import has_dependent_launch
from specengine.kernels.head.partials_triton import (
    best_keys,
    key_index,
    key_value,
    load_sums,
    log_sums,
    make_share,
    ordered_key,
    topk_candidates,
)
from specengine.kernels.head.types import BlockPartials
from specengine.kernels.tree.types import Beams, Drawn, Found

_MIN_SHARE, _MAX_SHARES = 1024, 32  # columns of one program; programs of one row


@triton.jit
def _tree_step_kernel(
    logits_ptr,
    ids_ptr,
    ranks_ptr,
    drawn_ptr,
    drawn_scores_ptr,
    greedy_ptr,
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
    num_shares,
    width,
    K: tl.constexpr,
    P: tl.constexpr,
    HAS_SHARES: tl.constexpr,
    DEPENDENT: tl.constexpr,
    HAS_IDS: tl.constexpr,
    BY_RANK: tl.constexpr,
    HAS_DRAWN: tl.constexpr,
    IS_ROOT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_SHARES: tl.constexpr,
    BLOCK_PAST: tl.constexpr,
):
    if HAS_SHARES:
        request = tl.program_id(0).to(tl.int64)
        shares = num_shares
    else:
        row = tl.program_id(0).to(tl.int64)
        shares = tl.num_programs(1)
        share = row * shares + tl.program_id(1)
        make_share(
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

    beams, ranks = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_K)
    is_beam, is_rank = beams < P, ranks < K
    rows = request * P + beams
    path_scores = tl.zeros([BLOCK_P], tl.float32)
    parents = tl.full([BLOCK_P], -1, tl.int64)
    if not IS_ROOT:
        path_scores = tl.load(old_scores_ptr + request * K + beams, mask=is_beam, other=0.0)
        parents = tl.load(old_candidates_ptr + request * K + beams, mask=is_beam, other=0)
    if DEPENDENT:
        gdc_wait()

    if BY_RANK:
        own = tl.load(ranks_ptr + ranks, mask=is_rank, other=0.0)[None, :]
    else:
        largest, sums = load_sums(sums_ptr, rows, is_beam, shares, BLOCK_SHARES)
    keys = topk_candidates(
        keys_ptr, rows, is_beam, shares, width, K, BLOCK_P, BLOCK_K, BLOCK_SHARES
    )
    found = best_keys(keys, ranks, K)
    is_new = is_beam[:, None] & is_rank[None, :]
    tokens = key_index(found)
    if HAS_IDS:
        tokens = tl.load(ids_ptr + tokens, mask=is_new, other=0)
    if not BY_RANK:
        own = tl.minimum(key_value(found) - log_sums(largest, sums, is_beam)[:, None], 0.0)
    if HAS_DRAWN:
        is_greedy = tl.load(greedy_ptr + request) != 0
        drawn = tl.load(drawn_ptr + rows[:, None] * K + ranks[None, :], mask=is_new, other=0)
        tokens = tl.where(is_greedy, tokens, drawn)
        drawn_scores = tl.load(drawn_scores_ptr + ranks, mask=is_rank, other=0.0)[None, :]
        own = tl.where(is_greedy, own, drawn_scores)
    scores = path_scores[:, None] + own
    index = beams[:, None] * K + ranks[None, :]
    places = request * candidates + first + index
    tl.store(tokens_ptr + places, tokens, mask=is_new)
    tl.store(scores_ptr + places, scores, mask=is_new)
    tl.store(parents_ptr + places, tl.broadcast_to(parents[:, None], index.shape), mask=is_new)

    new = tl.reshape(tl.where(is_new, ordered_key(scores, index), -1), [1, BLOCK_P * BLOCK_K])
    best = tl.reshape(best_keys(new, ranks, K), [BLOCK_K])
    tokens = tl.reshape(tokens, [1, BLOCK_P * BLOCK_K])
    tokens = tl.sum(tl.where(new == best[:, None], tokens, 0), 1)
    picked = key_index(best)
    above = picked // K
    places = request * K + ranks
    tl.store(beam_tokens_ptr + places, tokens, mask=is_rank)
    tl.store(beam_scores_ptr + places, key_value(best), mask=is_rank)
    tl.store(beam_candidates_ptr + places, first + picked, mask=is_rank)
    tl.store(above_ptr + places, request * P + above, mask=is_rank)
    tl.store(depths_ptr + places, tl.full([BLOCK_K], past // K, tl.int64), mask=is_rank)
    nodes = tl.arange(0, BLOCK_PAST)
    seen = (nodes[None, :] == past + ranks[:, None]).to(tl.uint8)
    if not IS_ROOT:
        old = old_mask_ptr + (request * K + above)[:, None] * past + nodes[None, :]
        is_old = is_rank[:, None] & (nodes < past)[None, :]
        seen = tl.where((nodes < past)[None, :], tl.load(old, mask=is_old, other=0), seen)
    inside = is_rank[:, None] & (nodes < past + K)[None, :]
    tl.store(mask_ptr + places[:, None] * (past + K) + nodes[None, :], seen, mask=inside)


@dataclass(frozen=True)
class _Given:
    """Partials of rows: of a head, or to be made from logits. What is not there is any tensor."""

    logits: Tensor
    keys: Tensor
    sums: Tensor
    num_cols: int
    stride: int
    shares: int
    width: int  # columns that a share has side by side

    @classmethod
    def of(cls, logits_TV: Tensor | BlockPartials, topk: int) -> _Given:
        if isinstance(logits_TV, BlockPartials):
            keys, sums = logits_TV.keys_RSK, logits_TV.sums_RS2
            return cls(sums, keys, sums, 0, 0, keys.shape[1], logits_TV.width)
        rows, num_cols = logits_TV.shape
        block = max(_MIN_SHARE, triton.next_power_of_2(triton.cdiv(num_cols, _MAX_SHARES)))
        shares = triton.cdiv(num_cols, block)
        keys = torch.empty(rows * shares * topk, dtype=torch.int64, device=logits_TV.device)
        sums = torch.empty(rows * shares * 2, dtype=torch.float32, device=logits_TV.device)
        return cls(logits_TV, keys, sums, num_cols, logits_TV.stride(0), shares, block)


def tree_step(
    logits_TV: Tensor | BlockPartials,
    beams: Beams | None,
    found: Found,
    topk: int,
    counters: Tensor,
    ids: Tensor | None,
    rank_scores: Tensor | None,
    drawn: Drawn | None,
) -> Beams:
    batch_size, candidates = found.tokens_BC.shape
    per_request = 1 if beams is None else topk
    past = 0 if beams is None else beams.mask_BKN.shape[2]
    new = _empty_beams(batch_size, topk, past, found.tokens_BC.device)
    given, has_shares = _Given.of(logits_TV, topk), isinstance(logits_TV, BlockPartials)
    dependent = has_shares and has_dependent_launch(found.tokens_BC)
    grid = (batch_size,) if has_shares else (batch_size * per_request, given.shares)
    old = new if beams is None else beams
    _tree_step_kernel[grid](
        given.logits,
        given.logits if ids is None else ids,
        given.logits if rank_scores is None else rank_scores,
        given.logits if drawn is None else drawn.tokens_TK,
        given.logits if drawn is None else drawn.scores_K,
        given.logits if drawn is None else drawn.greedy_B.view(torch.uint8),
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
        given.keys,
        given.sums,
        counters,
        given.num_cols,
        given.stride,
        candidates,
        0 if beams is None else topk + (past // topk - 1) * topk**2,
        past,
        given.shares,
        given.width,
        K=topk,
        P=per_request,
        HAS_SHARES=has_shares,
        DEPENDENT=dependent,
        HAS_IDS=ids is not None,
        BY_RANK=rank_scores is not None,
        HAS_DRAWN=drawn is not None,
        IS_ROOT=beams is None,
        BLOCK=given.width,
        BLOCK_K=triton.next_power_of_2(topk),
        BLOCK_P=triton.next_power_of_2(per_request),
        BLOCK_SHARES=triton.next_power_of_2(given.shares),
        BLOCK_PAST=triton.next_power_of_2(past + topk),
        num_warps=4,
        # It must not signal its own end early: forwards behind it read its masks and depths before
        # they wait (docs/hazards.md).
        **({"launch_pdl": True} if dependent else {}),
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
