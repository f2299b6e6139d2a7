"""Online softmax over paged keys, in Triton: what the attention kernel is made of.

Logarithms are to base 2 throughout, which the hardware takes directly.
"""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def to_fp8(x, cache_ptr):
    """x as an FP8 cache holds it: rounded to e4m3, clipped where that ends."""
    wide = tl.minimum(tl.maximum(x.to(tl.float32), -448.0), 448.0)
    return wide.to(cache_ptr.dtype.element_ty)


@triton.jit
def as_in_fp8(x):
    """What `to_fp8` keeps of x, in float32, bit for bit: the nearest number with 3 bits behind the
    first (halves to even), below 2^-6 the nearest multiple of 2^-9.

    Widening what `to_fp8` gave is the same on paper. Triton 3.6 compiles that wrongly for an H100
    where a thread holds four values or more: attention saw other keys than were written.
    """
    wide = tl.minimum(tl.maximum(x.to(tl.float32), -448.0), 448.0)
    bits = wide.to(tl.uint32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000
    small = (wide + 24576.0) - 24576.0  # whose last place is 2^-9
    return tl.where(tl.abs(wide) < 0.015625, small, bits.to(tl.float32, bitcast=True))


@triton.jit
def oldest_seen(position, window, RESETS: tl.constexpr):
    """The first position that one sees: of the last `window` up to its own, or, where the window
    resets, of its own chunk of so many."""
    if RESETS:
        oldest = position - position % window
    else:
        oldest = position - window + 1
    return oldest


@triton.jit
def sees(
    cols,
    end,
    prefix,
    queries,
    num_queries,
    tree_ptr,
    nodes,
    past,
    positions_ptr,
    window,
    HAS_TREE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    RESETS: tl.constexpr,
):
    """Whether row i, query queries[i] of its request, sees column cols[j]; none beyond end."""
    if HAS_TREE:
        news = cols - prefix
        in_tree = (news >= -past) & (cols < end)
        places = queries[:, None] * (past + nodes) + (news + past)[None, :]
        inside = (queries < num_queries)[:, None] & in_tree[None, :]
        seen = tl.load(tree_ptr + places, mask=inside, other=0) != 0
        visible = ((news < -past) & (cols < end))[None, :] | seen
        if HAS_WINDOW:
            here = tl.load(positions_ptr + queries, mask=queries < num_queries, other=0)
            there = tl.load(positions_ptr + news, mask=in_tree & (news >= 0), other=0)
            there = tl.where(news < 0, cols, there)
            is_past = in_tree & (news < 0)
            visible = visible & (
                (there[None, :] >= oldest_seen(here, window, RESETS)[:, None]) | is_past[None, :]
            )
    else:
        here = prefix + queries
        visible = cols[None, :] < tl.minimum(here + 1, end)[:, None]
        if HAS_WINDOW:
            visible = visible & (cols[None, :] >= oldest_seen(here, window, RESETS)[:, None])
    return visible


@triton.jit
def raise_max(row_max, other_max):
    """The new maximum of each row, a finite number to subtract in its place (a row may have seen
    nothing yet), and the factor for what was summed before."""
    new_max = tl.maximum(row_max, other_max)
    finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    return new_max, finite_max, tl.exp2(row_max - finite_max)


@triton.jit
def started(sinks_ptr, heads, valid, split, BLOCK_M: tl.constexpr, HAS_SINKS: tl.constexpr):
    """Maximum and sum of each row before any key: of its head's sink, which the first share has."""
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        sinks = tl.load(sinks_ptr + heads, mask=valid, other=0.0).to(tl.float32)
        row_max = tl.where(split == 0, sinks * 1.4426950408889634, row_max)
        total = tl.where(split == 0, 1.0, total)
    return row_max, total


@triton.jit
def capped(scores, softcap):
    """softcap * tanh(scores / softcap). Near 0 it is wrong by 1e-7 of softcap at most."""
    halves = 1.0 / (1.0 + tl.exp2(scores * (-2.0 * 1.4426950408889634 / softcap)))
    return (2.0 * halves - 1.0) * softcap


@triton.jit
def key_range(
    prefix,
    num_queries,
    first_query,
    queries_per_tile,
    past,
    window,
    first_key,
    split,
    splits,
    min_blocks,
    BLOCK_N: tl.constexpr,
    HAS_TREE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    RESETS: tl.constexpr,
):
    """Begin and end of this program's share of the keys, and how many programs have a share. The
    shares depend on the lengths alone, so short requests are not split."""
    low = tl.minimum(first_key, prefix)
    high = prefix + num_queries
    if not HAS_TREE:
        high = tl.minimum(prefix + first_query + queries_per_tile, high)
    if HAS_WINDOW:
        position = prefix - past
        if not HAS_TREE:
            position += first_query
        low = tl.maximum(oldest_seen(position, window, RESETS), low)
    blocks = tl.cdiv(high - low, BLOCK_N)
    share = tl.maximum(tl.cdiv(blocks, splits), min_blocks)
    begin = low + split * share * BLOCK_N
    return begin, tl.minimum(begin + share * BLOCK_N, high), tl.cdiv(blocks, share)


@triton.jit
def attend(
    q,
    k_ptr,
    v_ptr,
    table_ptr,
    tree_ptr,
    positions_ptr,
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
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_TREE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    RESETS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Online softmax over keys begin .. end - 1: normalised output and log2-sum-exp of each row.
    row_max, total: what was summed before, without a value (`started`)."""
    BLOCK_M: tl.constexpr = q.shape[0]
    BLOCK_D: tl.constexpr = q.shape[1]
    dims = tl.arange(0, BLOCK_D)
    in_head = (dims < HEAD_DIM)[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(begin, end, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        in_share = cols < end
        slots = tl.load(table_ptr + cols, mask=in_share, other=0).to(tl.int64)[:, None]
        loaded = in_share[:, None] & in_head
        k = tl.load(k_ptr + slots * stride_ks + dims[None, :], mask=loaded, other=0.0)
        v = tl.load(v_ptr + slots * stride_vs + dims[None, :], mask=loaded, other=0.0)
        k, v = k.to(q.dtype), v.to(q.dtype)  # of an FP8 cache
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        if HAS_SOFTCAP:
            scores = capped(scores, softcap_log2)
        visible = sees(
            cols,
            end,
            prefix,
            queries,
            num_queries,
            tree_ptr,
            nodes,
            past,
            positions_ptr,
            window,
            HAS_TREE,
            HAS_WINDOW,
            RESETS,
        )
        scores = tl.where(visible, scores, float("-inf"))
        row_max, finite_max, decay = raise_max(row_max, tl.max(scores, 1))
        weights = tl.exp2(scores - finite_max[:, None])
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        acc += tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    total = tl.where(total == 0.0, 1.0, total)  # of a row that sees nothing here: row_max is -inf
    return acc / total[:, None], row_max + tl.log2(total)


@triton.jit
def merge_partials(
    partial_ptr, lse_ptr, active, valid, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr
):
    """The shares' normalised outputs, weighted by their log2-sum-exp, in order of the keys."""
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # Of four shares the loads are on their way together: one after the other they would be the
    # longer part of a short text's attention. Large shares would take the registers of what the
    # program did before.
    AT_ONCE: tl.constexpr = 4 if BLOCK_M * BLOCK_D <= 2048 else 1
    for share in tl.range(0, active, loop_unroll_factor=AT_ONCE):
        places = share * BLOCK_M + rows
        # Written by other multiprocessors: not to be read through this one's first-level cache.
        lse = tl.load(lse_ptr + places, mask=valid, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(
            partial_ptr + places[:, None] * BLOCK_D + dims[None, :],
            mask=valid[:, None],
            other=0.0,
            cache_modifier=".cg",
        )
        row_max, finite_max, decay = raise_max(row_max, lse)
        weight = tl.exp2(lse - finite_max)
        acc = acc * decay[:, None] + part * weight[:, None]
        total = total * decay + weight
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def last_to_arrive(out, lse, partial_ptr, lse_ptr, counter_ptr, split, active, valid):
    """Leave this share's result in memory. True for the program that finds all others' there."""
    BLOCK_M: tl.constexpr = out.shape[0]
    BLOCK_D: tl.constexpr = out.shape[1]
    places = split * BLOCK_M + tl.arange(0, BLOCK_M)
    cells = places[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    tl.store(partial_ptr + cells, out, mask=valid[:, None])
    tl.store(lse_ptr + places, lse, mask=valid)
    # Every thread's stores must be out before the count says so.
    tl.debug_barrier()
    return tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == active - 1
