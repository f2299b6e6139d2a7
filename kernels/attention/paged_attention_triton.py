"""Paged attention in Triton: one kernel for decode, extend and verification.

A program takes one KV head of one request, a tile of its queries (the query heads of the group and
the queries together are the rows of one product) and a share of the keys. Shares are merged by
whichever program finishes last, so that there is one launch at any length.
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

from specengine.kernels.attention.online_softmax_triton import (
    attend,
    key_range,
    last_to_arrive,
    merge_partials,
    started,
)
from specengine.kernels.attention.types import PagedBatch
from specengine.kernels.dispatch import has_dependent_launch, multiprocessors

_MAX_SPLITS = 32
_MIN_SHARE = 128  # keys for which a program of its own pays for the merge


@triton.jit(
    do_not_specialize=["nodes", "past", "window", "splits", "min_blocks"],
    do_not_specialize_on_alignment=[
        "rows_ptr",
        "seq_lens_ptr",
        "indptr_ptr",
        "positions_ptr",
        "tree_ptr",
        "first_keys_ptr",
    ],
)
def _paged_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    table_ptr,
    rows_ptr,
    seq_lens_ptr,
    indptr_ptr,
    positions_ptr,
    tree_ptr,
    first_keys_ptr,
    partial_ptr,
    lse_ptr,
    counters_ptr,
    sinks_ptr,
    stride_qt,
    stride_qh,
    stride_ks,
    stride_kh,
    stride_vs,
    stride_vh,
    stride_table,
    nodes,
    past,
    window,
    splits,
    min_blocks,
    scale_log2,
    softcap_log2,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_TREE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    RESETS: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(1)
    num_kv_heads = tl.num_programs(1)
    request = tl.program_id(2)
    tiles = tl.num_programs(0) // splits
    # Later tiles see more keys: start them first.
    tile = tiles - 1 - tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    first_row = tl.load(indptr_ptr + request)
    num_queries = (tl.load(indptr_ptr + request + 1) - first_row).to(tl.int32)
    first_query = tile * QUERIES
    if first_query >= num_queries:
        return
    prefix = tl.load(seq_lens_ptr + request).to(tl.int32) - num_queries
    row = tl.load(rows_ptr + request)
    first_key = 0
    if HAS_FIRST:
        first_key = tl.load(first_keys_ptr + row).to(tl.int32)
    begin, end, active = key_range(
        prefix,
        num_queries,
        first_query,
        QUERIES,
        past,
        window,
        first_key,
        split,
        splits,
        min_blocks,
        BLOCK_N,
        HAS_TREE,
        HAS_WINDOW,
        RESETS,
    )
    if split >= active:
        return

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)[None, :]
    queries = first_query + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    valid = (rows < QUERIES * GROUP) & (queries < num_queries)
    cells = valid[:, None] & (dims < HEAD_DIM)
    q_rows = (first_row + queries) * stride_qt + heads * stride_qh
    row_max, total = started(sinks_ptr, heads, valid, split, BLOCK_M, HAS_SINKS)
    out, lse = attend(
        tl.load(q_ptr + q_rows[:, None] + dims, mask=cells, other=0.0),
        k_ptr + kv_head * stride_kh,
        v_ptr + kv_head * stride_vh,
        table_ptr + row * stride_table,
        tree_ptr + request.to(tl.int64) * nodes * (past + nodes),
        positions_ptr + first_row,
        stride_ks,
        stride_vs,
        begin,
        end,
        prefix,
        queries,
        num_queries,
        nodes,
        past,
        window,
        scale_log2,
        softcap_log2,
        row_max,
        total,
        HEAD_DIM,
        BLOCK_N,
        HAS_TREE,
        HAS_WINDOW,
        RESETS,
        HAS_SOFTCAP,
    )
    out_rows = ((first_row + queries) * GROUP * num_kv_heads + heads) * HEAD_DIM
    out_ptrs = out_ptr + out_rows[:, None] + dims
    if SPLIT:
        group = (request * num_kv_heads + kv_head) * tiles + tile
        if active > 1:
            lse_ptr += group.to(tl.int64) * splits * BLOCK_M
            partial_ptr += group.to(tl.int64) * splits * BLOCK_M * BLOCK_D
            counter_ptr = counters_ptr + group
            if last_to_arrive(out, lse, partial_ptr, lse_ptr, counter_ptr, split, active, valid):
                tl.store(counter_ptr, 0)
                merged = merge_partials(partial_ptr, lse_ptr, active, valid, BLOCK_M, BLOCK_D)
                tl.store(out_ptrs, merged.to(out_ptr.dtype.element_ty), mask=cells)
        else:
            tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=cells)
    else:
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=cells)


@dataclass(frozen=True)
class Blocks:
    """Shape of a program: rows (queries x group), keys an iteration, warps, pipeline stages."""

    rows: int
    keys: int
    warps: int
    stages: int


def _blocks(
    dtype: torch.dtype, head_dim: int, group: int, max_queries: int, has_tree: bool
) -> Blocks:
    """Rows fit the queries while they are few; then tiles as large as registers allow. Measured on
    an H200 (benchmarks/results, paged-attention)."""
    if dtype == torch.float32:
        largest, keys = (32, 32) if head_dim <= 128 else (16, 16)
    elif head_dim <= 128:
        largest, keys = 64 if has_tree and head_dim <= 64 else 128, 64
    else:
        largest, keys = 64, 32
    least = triton.next_power_of_2(group)
    rows = triton.next_power_of_2(min(max_queries, 128) * group)
    rows = max(16, least, min(rows, largest))
    if dtype != torch.float32 and rows == 16 and head_dim <= 128:
        return Blocks(16, 128, 4, 2) if head_dim <= 64 else Blocks(16, 64, 2, 3)
    if dtype != torch.float32 and has_tree and 64 < head_dim <= 128:
        return Blocks(rows, 128, 8, 3)
    warps = 8 if rows * head_dim > 4096 else 4
    return Blocks(rows, keys, warps, stages=2 if rows > 64 else 3)


def _choose_splits(batch: PagedBatch, groups: int, device: torch.device) -> int:
    """Enough programs for two a multiprocessor, none with fewer than _MIN_SHARE keys."""
    if batch.counters is None or groups > batch.counters.numel():
        return 1
    wanted = triton.cdiv(2 * multiprocessors(device), groups)
    return int(max(1, min(wanted, _MAX_SPLITS, batch.max_keys // _MIN_SHARE)))


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    num_splits: int | None,
    chunk: int | None = None,
) -> Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    requests, num_kv_heads, head_dim = len(batch.seq_lens), k_cache.shape[1], q.shape[2]
    if out.numel() == 0:
        return out
    group = q.shape[1] // num_kv_heads
    has_tree = batch.tree_mask is not None
    blocks = _blocks(q.dtype, head_dim, group, batch.max_queries, has_tree)
    block_dim = max(16, triton.next_power_of_2(head_dim))
    tiles = triton.cdiv(batch.max_queries, blocks.rows // group)
    groups = requests * num_kv_heads * tiles
    splits = num_splits or _choose_splits(batch, groups, q.device)
    if splits > 1 and (batch.counters is None or groups > batch.counters.numel()):
        raise ValueError(f"{splits} splits of {groups} groups need as many counters, all zero")
    shares = groups * splits * blocks.rows if splits > 1 else 1
    partial = torch.empty(shares * block_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(shares, dtype=torch.float32, device=q.device)
    tree_mask = batch.tree_mask
    dependent = has_dependent_launch(q)
    _paged_attention_kernel[(tiles * splits, num_kv_heads, requests)](
        q,
        k_cache,
        v_cache,
        out,
        batch.req_to_token,
        batch.req_pool_indices,
        batch.seq_lens,
        batch.qo_indptr,
        batch.positions,
        batch.positions if tree_mask is None else tree_mask.view(torch.uint8),
        batch.positions if batch.first_keys is None else batch.first_keys,
        partial,
        lse,
        lse if batch.counters is None else batch.counters,
        lse if sinks is None else sinks,
        *q.stride()[:2],
        *k_cache.stride()[:2],
        *v_cache.stride()[:2],
        batch.req_to_token.stride(0),
        0 if tree_mask is None else tree_mask.shape[1],
        batch.num_past,
        chunk or window or 0,
        splits,
        1 if num_splits else max(_MIN_SHARE // blocks.keys, 1),
        scale * math.log2(math.e),
        1.0 if softcap is None else softcap * math.log2(math.e),
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_M=blocks.rows,
        BLOCK_N=blocks.keys,
        BLOCK_D=block_dim,
        HAS_TREE=has_tree,
        HAS_WINDOW=window is not None or chunk is not None,
        RESETS=chunk is not None,
        HAS_FIRST=batch.first_keys is not None,
        HAS_SOFTCAP=softcap is not None,
        HAS_SINKS=sinks is not None,
        SPLIT=splits > 1,
        DEPENDENT=dependent,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
        **({"launch_pdl": True} if dependent else {}),
    )
    return out
