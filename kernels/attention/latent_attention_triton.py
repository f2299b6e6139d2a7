"""Absorbed latent attention in Triton: shares of the keys, then their merge.

Rows of a program are pairs of a query and a head, all of one request. A key is loaded once for the
scores of all rows and for their values, which are a part of it.
"""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specengine.kernels.attention.online_softmax_triton import key_range, raise_max, sees
from specengine.kernels.attention.types import PagedBatch
from specengine.kernels.dispatch import has_dependent_launch, multiprocessors

_MAX_SPLITS = 64
_MIN_SHARE = 128  # keys for which a program of its own pays for the merge
_MERGED = 8  # shares that the merge reads at once


@triton.jit(
    do_not_specialize=["nodes", "past", "splits", "min_blocks"],
    do_not_specialize_on_alignment=[
        "rows_ptr",
        "seq_lens_ptr",
        "indptr_ptr",
        "tree_ptr",
        "first_keys_ptr",
    ],
)
def _shares_kernel(
    q_ptr,
    cache_ptr,
    out_ptr,
    table_ptr,
    rows_ptr,
    seq_lens_ptr,
    indptr_ptr,
    tree_ptr,
    first_keys_ptr,
    partial_ptr,
    lse_ptr,
    stride_qt,
    stride_qh,
    stride_slot,
    stride_table,
    nodes,
    past,
    splits,
    min_blocks,
    scale_log2,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    HAS_TREE: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    SPLIT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    request = tl.program_id(1)
    tiles = tl.num_programs(0) // splits
    # Later tiles see more keys: start them first.
    tile = tiles - 1 - tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    first_row = tl.load(indptr_ptr + request)
    num_queries = (tl.load(indptr_ptr + request + 1) - first_row).to(tl.int32)
    if tile * BLOCK_M >= num_queries * HEADS:
        return
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    queries = rows // HEADS
    valid = queries < num_queries
    first_query = tile * BLOCK_M // HEADS
    last_query = (tile * BLOCK_M + BLOCK_M - 1) // HEADS
    prefix = tl.load(seq_lens_ptr + request).to(tl.int32) - num_queries
    row = tl.load(rows_ptr + request)
    first_key = 0
    if HAS_FIRST:
        first_key = tl.load(first_keys_ptr + row).to(tl.int32)
    begin, end, active = key_range(
        prefix,
        num_queries,
        first_query,
        last_query - first_query + 1,
        past,
        0,
        first_key,
        split,
        splits,
        min_blocks,
        BLOCK_N,
        HAS_TREE,
        False,
        False,
    )
    outs = first_row * HEADS + rows
    if split >= active:
        tl.store(lse_ptr + outs * splits + split, float("-inf"), mask=valid)
        return

    ranks, ropes = tl.arange(0, BLOCK_RANK), tl.arange(0, BLOCK_ROPE)
    is_rank, is_rope = (ranks < RANK)[None, :], (ropes < ROPE)[None, :]
    q_rows = q_ptr + (first_row + queries) * stride_qt + (rows % HEADS) * stride_qh
    q_rank = tl.load(q_rows[:, None] + ranks[None, :], mask=valid[:, None] & is_rank, other=0.0)
    q_rope = tl.load(
        q_rows[:, None] + RANK + ropes[None, :], mask=valid[:, None] & is_rope, other=0.0
    )
    table_ptr += row * stride_table
    tree_ptr += request.to(tl.int64) * nodes * (past + nodes)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_RANK], tl.float32)
    for start in range(begin, end, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        in_share = cols < end
        slots = tl.load(table_ptr + cols, mask=in_share, other=0).to(tl.int64)
        keys = cache_ptr + slots[:, None] * stride_slot
        latent = tl.load(keys + ranks[None, :], mask=in_share[:, None] & is_rank, other=0.0)
        rope = tl.load(keys + RANK + ropes[None, :], mask=in_share[:, None] & is_rope, other=0.0)
        latent, rope = latent.to(q_rank.dtype), rope.to(q_rank.dtype)  # of an FP8 cache
        scores = tl.dot(q_rank, tl.trans(latent), input_precision="ieee")
        scores = tl.dot(q_rope, tl.trans(rope), scores, input_precision="ieee") * scale_log2
        visible = sees(
            cols,
            end,
            prefix,
            queries,
            num_queries,
            tree_ptr,
            nodes,
            past,
            tree_ptr,
            0,
            HAS_TREE,
            False,
            False,
        )
        scores = tl.where(visible, scores, float("-inf"))
        row_max, finite_max, decay = raise_max(row_max, tl.max(scores, 1))
        weights = tl.exp2(scores - finite_max[:, None])
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        acc = tl.dot(weights.to(latent.dtype), latent, acc, input_precision="ieee")
    total = tl.where(total == 0.0, 1.0, total)  # of a row that sees nothing here: row_max is -inf
    result, lse = acc / total[:, None], row_max + tl.log2(total)
    cells = valid[:, None] & is_rank
    if SPLIT:
        places = outs * splits + split
        tl.store(partial_ptr + places[:, None] * RANK + ranks[None, :], result, mask=cells)
        tl.store(lse_ptr + places, lse, mask=valid)
    else:
        target = out_ptr + outs[:, None] * RANK + ranks[None, :]
        tl.store(target, result.to(out_ptr.dtype.element_ty), mask=cells)


@triton.jit(do_not_specialize=["splits"])
def _merge_kernel(
    partial_ptr,
    lse_ptr,
    out_ptr,
    splits,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    SHARES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One row: its shares' normalised values, weighted by their log2-sum-exp. Shares without keys
    are not read."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    lse_ptr += row * splits
    order = tl.arange(0, BLOCK_SPLITS)
    lse = tl.load(lse_ptr + order, mask=order < splits, other=float("-inf"))
    row_max = tl.max(lse, 0)
    finite_max = tl.where(row_max == float("-inf"), 0.0, row_max)
    total = tl.sum(tl.exp2(lse - finite_max), 0)
    ranks = tl.arange(0, BLOCK_RANK)
    acc = tl.zeros([BLOCK_RANK], tl.float32)
    for start in range(0, splits, SHARES):
        shares = start + tl.arange(0, SHARES)
        weights = tl.load(lse_ptr + shares, mask=shares < splits, other=float("-inf"))
        weights = tl.exp2(weights - finite_max)
        part = tl.load(
            partial_ptr + (row * splits + shares)[:, None] * RANK + ranks[None, :],
            mask=(weights > 0.0)[:, None] & (ranks < RANK)[None, :],
            other=0.0,
        )
        acc += tl.sum(part * weights[:, None], 0)
    acc = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * RANK + ranks, acc.to(out_ptr.dtype.element_ty), mask=ranks < RANK)


@dataclass(frozen=True)
class Blocks:
    """Shape of a program: rows (queries x heads), keys an iteration, warps, pipeline stages."""

    rows: int
    keys: int
    warps: int
    stages: int


def _blocks(dtype: torch.dtype, num_rows: int) -> Blocks:
    """num_rows: of the longest request. Accumulators of 512 a row fill the registers at 64 rows."""
    rows = max(16, min(triton.next_power_of_2(num_rows), 64))
    if dtype == torch.float32:
        return Blocks(16, 16, 4, 1)
    if rows == 16:
        return Blocks(16, 64, 4, 2)
    return Blocks(rows, 32 if rows == 64 else 64, 8, 2)


def _choose_splits(batch: PagedBatch, groups: int, device: torch.device) -> int:
    """Enough programs for one a multiprocessor, none with fewer than _MIN_SHARE keys."""
    wanted = multiprocessors(device) // groups
    return int(max(1, min(wanted, _MAX_SPLITS, batch.max_keys // _MIN_SHARE)))


def latent_attention(
    q: Tensor,
    cache: Tensor,
    value_dim: int,
    batch: PagedBatch,
    scale: float,
    num_splits: int | None,
) -> Tensor:
    tokens, heads, width = q.shape
    out = torch.empty(tokens, heads, value_dim, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    requests = len(batch.seq_lens)
    blocks = _blocks(q.dtype, batch.max_queries * heads)
    tiles = triton.cdiv(batch.max_queries * heads, blocks.rows)
    splits = num_splits or _choose_splits(batch, requests * tiles, q.device)
    shares = tokens * heads * splits if splits > 1 else 1
    partial = torch.empty(shares * value_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(tokens * heads * splits, dtype=torch.float32, device=q.device)
    tree_mask = batch.tree_mask
    dependent = has_dependent_launch(q)
    launch = {"launch_pdl": True} if dependent else {}
    _shares_kernel[(tiles * splits, requests)](
        q,
        cache,
        out,
        batch.req_to_token,
        batch.req_pool_indices,
        batch.seq_lens,
        batch.qo_indptr,
        batch.seq_lens if tree_mask is None else tree_mask.view(torch.uint8),
        batch.seq_lens if batch.first_keys is None else batch.first_keys,
        partial,
        lse,
        *q.stride()[:2],
        cache.stride(0),
        batch.req_to_token.stride(0),
        0 if tree_mask is None else tree_mask.shape[1],
        batch.num_past,
        splits,
        1 if num_splits else max(_MIN_SHARE // blocks.keys, 1),
        scale * math.log2(math.e),
        HEADS=heads,
        RANK=value_dim,
        ROPE=width - value_dim,
        BLOCK_M=blocks.rows,
        BLOCK_N=blocks.keys,
        BLOCK_RANK=max(16, triton.next_power_of_2(value_dim)),
        BLOCK_ROPE=max(16, triton.next_power_of_2(width - value_dim)),
        HAS_TREE=tree_mask is not None,
        HAS_FIRST=batch.first_keys is not None,
        SPLIT=splits > 1,
        DEPENDENT=dependent,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
        **launch,
    )
    if splits > 1:
        _merge_kernel[(tokens * heads,)](
            partial,
            lse,
            out,
            splits,
            RANK=value_dim,
            BLOCK_RANK=triton.next_power_of_2(value_dim),
            BLOCK_SPLITS=triton.next_power_of_2(splits),
            SHARES=_MERGED,
            DEPENDENT=dependent,
            num_warps=4,
            **launch,
        )
    return out
