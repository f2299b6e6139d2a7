"""Norms of heads, rotation, KV write and paged attention of a few queries a request, in one Triton
kernel.

A program takes one KV head of one request, all of its queries or a tile of them, and a share of the
keys written by earlier forwards. The first share also takes the new keys, straight from the
projection, and the first tile writes them to the cache. Nothing reads what this kernel writes to
the cache before the next forward, so that the old keys can be fetched before the kernel ahead has
ended.
"""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specengine.kernels.attention.online_softmax_triton import (
    as_in_fp8,
    last_to_arrive,
    merge_partials,
    started,
    to_fp8,
)
from specengine.kernels.attention.rope_attention_blocks import (
    blocks_for,
    choose_splits,
    rows_for,
    within,
)
from specengine.kernels.attention.rope_attention_rows_triton import (
    absorb,
    angles,
    fetch,
    rotated,
    whole_rows,
)
from specengine.kernels.attention.types import HeadNorms, PagedBatch
from specengine.kernels.dispatch import has_dependent_launch, shared_bytes

_NARROW = 2**31  # elements of a cache whose places fit 32 bits


@triton.jit(
    do_not_specialize=["nodes", "window", "tiles", "splits", "min_blocks"],
    do_not_specialize_on_alignment=[
        "positions_ptr",
        "loc_ptr",
        "rows_ptr",
        "seq_lens_ptr",
        "indptr_ptr",
        "tree_ptr",
        "first_keys_ptr",
    ],
)
def _rope_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    positions_ptr,
    cos_sin_ptr,
    k_cache_ptr,
    v_cache_ptr,
    loc_ptr,
    table_ptr,
    rows_ptr,
    seq_lens_ptr,
    indptr_ptr,
    tree_ptr,
    first_keys_ptr,
    partial_ptr,
    lse_ptr,
    counters_ptr,
    sinks_ptr,
    q_gain_ptr,
    k_gain_ptr,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_cs,
    stride_ch,
    stride_table,
    stride_cos_sin,
    nodes,
    window,
    tiles,
    splits,
    min_blocks,
    scale_log2,
    softcap_log2,
    eps,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_NEW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_TREE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    SPLIT: tl.constexpr,
    DEPENDENT: tl.constexpr,
    NARROW: tl.constexpr,
    FP8: tl.constexpr,
    PEEL: tl.constexpr,
):
    if DEPENDENT:
        gdc_launch_dependents()
    split = tl.program_id(0)
    kv_head = tl.program_id(1) // tiles
    tile = tl.program_id(1) % tiles
    request = tl.program_id(2)
    first_row = tl.load(indptr_ptr + request)
    num_queries = (tl.load(indptr_ptr + request + 1) - first_row).to(tl.int32)
    prefix = tl.load(seq_lens_ptr + request).to(tl.int32) - num_queries
    row = tl.load(rows_ptr + request)
    low = 0
    if HAS_FIRST:
        low = tl.minimum(tl.load(first_keys_ptr + row).to(tl.int32), prefix)
    if HAS_WINDOW:
        low = tl.maximum(prefix - window + 1, low)
    blocks = tl.cdiv(prefix - low, BLOCK_N)
    share = tl.maximum(tl.cdiv(blocks, splits), min_blocks)
    active = tl.maximum(tl.cdiv(blocks, share), 1)
    if (split >= active) | (tile * BLOCK_M >= num_queries * GROUP):
        return
    begin = low + split * share * BLOCK_N
    end = tl.minimum(begin + share * BLOCK_N, prefix)

    WHOLE: tl.constexpr = HEAD_DIM == BLOCK_D
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    in_head = (dims < HEAD_DIM)[None, :]
    queries = rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    valid = queries < num_queries
    cells = whole_rows(valid, in_head, BLOCK_M, BLOCK_D, WHOLE)
    here = tl.load(positions_ptr + first_row + queries, mask=valid, other=0)
    cos, sin = angles(cos_sin_ptr, here, stride_cos_sin, dims, cells, HEAD_DIM)

    # Keys of earlier forwards: nothing that may still be running writes them.
    table_ptr += row * stride_table
    k_cache_ptr += kv_head * stride_ch
    v_cache_ptr += kv_head * stride_ch
    if PEEL:
        cols = begin + tl.arange(0, BLOCK_N)
        old = cols < end
        where = k_cache_ptr, v_cache_ptr, dims, in_head, stride_cs
        k, v = fetch(table_ptr, cols, old, *where, NARROW, WHOLE)
    news = tl.arange(0, BLOCK_NEW)
    is_new = news < num_queries
    if HAS_TREE:
        # Neither may the mask be written by what may still be running.
        tree_ptr += request.to(tl.int64) * nodes * nodes
        asking = queries < tl.where(split == 0, num_queries, 0)
        inside = asking[:, None] & is_new[None, :]
        in_tree = tl.load(tree_ptr + queries[:, None] * nodes + news[None, :], mask=inside, other=0)
    if DEPENDENT:
        gdc_wait()

    q_rows = q_ptr + (first_row + queries) * stride_qt + heads * stride_qh
    q = rotated(q_rows, q_gain_ptr, eps, dims, cos, sin, cells, HEAD_DIM, HAS_NORM)
    row_max, total = started(sinks_ptr, heads, valid, split, BLOCK_M, HAS_SINKS)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if split == 0:
        new_cells = whole_rows(is_new, in_head, BLOCK_NEW, BLOCK_D, WHOLE)
        at = tl.load(positions_ptr + first_row + news, mask=is_new, other=0)
        new_cos, new_sin = angles(cos_sin_ptr, at, stride_cos_sin, dims, new_cells, HEAD_DIM)
        k_rows = k_ptr + (first_row + news) * stride_kt + kv_head * stride_kh
        how = dims, new_cos, new_sin, new_cells, HEAD_DIM, HAS_NORM
        k_new = rotated(k_rows, k_gain_ptr, eps, *how)
        v_rows = v_ptr + (first_row + news) * stride_vt + kv_head * stride_vh
        v_new = tl.load(v_rows[:, None] + dims[None, :], mask=new_cells, other=0.0)
        slot = tl.load(loc_ptr + first_row + news, mask=is_new, other=0)[:, None]
        is_mine = news < tl.where(tile == 0, num_queries, 0)
        written = whole_rows(is_mine, in_head, BLOCK_NEW, BLOCK_D, WHOLE)
        k_kept, v_kept = k_new, v_new
        if FP8:
            # Later forwards read what is written: this one must see the same.
            k_kept, v_kept = to_fp8(k_new, k_cache_ptr), to_fp8(v_new, v_cache_ptr)
            k_new, v_new = as_in_fp8(k_new).to(q.dtype), as_in_fp8(v_new).to(q.dtype)
        tl.store(k_cache_ptr + slot * stride_cs + dims[None, :], k_kept, mask=written)
        tl.store(v_cache_ptr + slot * stride_cs + dims[None, :], v_kept, mask=written)
        if HAS_TREE:
            visible = in_tree != 0
        else:
            visible = (news[None, :] <= queries[:, None]) & is_new[None, :]
            if HAS_WINDOW:
                visible = visible & (news[None, :] > queries[:, None] - window)
        so_far = row_max, total, acc
        row_max, total, acc = absorb(
            q, k_new, v_new, visible, scale_log2, softcap_log2, *so_far, HAS_SOFTCAP
        )

    if PEEL:
        visible = old[None, :]
        if HAS_WINDOW:
            visible = visible & (cols[None, :] > here[:, None] - window)
        k, v = k.to(q.dtype), v.to(q.dtype)
        so_far = row_max, total, acc
        row_max, total, acc = absorb(
            q, k, v, visible, scale_log2, softcap_log2, *so_far, HAS_SOFTCAP
        )
        begin += BLOCK_N
    for start in range(begin, end, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        old = cols < end
        where = k_cache_ptr, v_cache_ptr, dims, in_head, stride_cs
        k, v = fetch(table_ptr, cols, old, *where, NARROW, WHOLE)
        visible = old[None, :]
        if HAS_WINDOW:
            visible = visible & (cols[None, :] > here[:, None] - window)
        k, v = k.to(q.dtype), v.to(q.dtype)
        so_far = row_max, total, acc
        row_max, total, acc = absorb(
            q, k, v, visible, scale_log2, softcap_log2, *so_far, HAS_SOFTCAP
        )
    total = tl.where(total == 0.0, 1.0, total)  # of a row that sees nothing in this share
    out = acc / total[:, None]

    num_heads = tl.num_programs(1) // tiles * GROUP
    out_rows = ((first_row + queries) * num_heads + heads) * HEAD_DIM
    out_ptrs = out_ptr + out_rows[:, None] + dims[None, :]
    if SPLIT:
        if active > 1:
            group = request * tl.num_programs(1) + tl.program_id(1)
            lse_ptr += group.to(tl.int64) * splits * BLOCK_M
            partial_ptr += group.to(tl.int64) * splits * BLOCK_M * BLOCK_D
            counter_ptr = counters_ptr + group
            lse = row_max + tl.log2(total)
            if last_to_arrive(out, lse, partial_ptr, lse_ptr, counter_ptr, split, active, valid):
                tl.store(counter_ptr, 0)
                merged = merge_partials(partial_ptr, lse_ptr, active, valid, BLOCK_M, BLOCK_D)
                tl.store(out_ptrs, merged.to(out_ptr.dtype.element_ty), mask=cells)
        else:
            tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=cells)
    else:
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=cells)


def rope_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin_cache: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    loc: Tensor,
    batch: PagedBatch,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    norms: HeadNorms | None,
    num_splits: int | None,
) -> Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    requests, num_kv_heads, head_dim = len(batch.seq_lens), k_cache.shape[1], q.shape[2]
    if out.numel() == 0:
        return out
    group = q.shape[1] // num_kv_heads
    block_dim = max(16, triton.next_power_of_2(head_dim))
    groups, wanted = requests * num_kv_heads, batch.max_queries * group
    rows = rows_for(q.dtype, head_dim, groups, wanted, q.device)
    tiles = triton.cdiv(wanted, rows)
    groups *= tiles
    blocks = blocks_for(q.dtype, head_dim, groups, rows)
    blocks = within(blocks, block_dim * q.element_size(), shared_bytes(q.device))
    splits = num_splits or choose_splits(batch, groups, blocks, q.device)
    shares = groups * splits * rows if splits > 1 else 1
    partial = torch.empty(shares * block_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(shares, dtype=torch.float32, device=q.device)
    tree_mask = batch.tree_mask
    dependent = has_dependent_launch(q)
    _rope_attention_kernel[(splits, num_kv_heads * tiles, requests)](
        q,
        k,
        v,
        out,
        batch.positions,
        cos_sin_cache,
        k_cache,
        v_cache,
        loc,
        batch.req_to_token,
        batch.req_pool_indices,
        batch.seq_lens,
        batch.qo_indptr,
        batch.positions if tree_mask is None else tree_mask.view(torch.uint8),
        batch.positions if batch.first_keys is None else batch.first_keys,
        partial,
        lse,
        lse if batch.counters is None else batch.counters,
        lse if sinks is None else sinks,
        q if norms is None else norms.q_weight,
        k if norms is None else norms.k_weight,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *k_cache.stride()[:2],
        batch.req_to_token.stride(0),
        cos_sin_cache.stride(0),
        0 if tree_mask is None else tree_mask.shape[1],
        0 if window is None else window,
        tiles,
        splits,
        1 if num_splits else max(blocks.min_share // blocks.keys, 1),
        scale * math.log2(math.e),
        1.0 if softcap is None else softcap * math.log2(math.e),
        0.0 if norms is None else norms.eps,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_M=rows,
        BLOCK_NEW=max(16, triton.next_power_of_2(batch.max_queries)),
        BLOCK_N=blocks.keys,
        BLOCK_D=block_dim,
        HAS_TREE=tree_mask is not None,
        HAS_WINDOW=window is not None,
        HAS_FIRST=batch.first_keys is not None,
        HAS_SOFTCAP=softcap is not None,
        HAS_SINKS=sinks is not None,
        HAS_NORM=norms is not None,
        SPLIT=splits > 1,
        DEPENDENT=dependent,
        NARROW=k_cache.numel() < _NARROW,
        FP8=k_cache.dtype != k.dtype,
        PEEL=blocks.peels,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
        **({"launch_pdl": True} if dependent else {}),
    )
    return out
