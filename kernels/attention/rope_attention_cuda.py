"""Norms of heads, rotation, KV write and paged attention for some requests, in CUDA C++: blocks of
a cluster share the keys of a KV head, and what they add up meets in their shared memory.

Refused, for rope_attention_triton.py to compute: heads of another size than 128, more than 16 rows
(queries x query heads of a KV head), a tree, a window, a softcap, sinks, first keys, a cache of
another dtype than the new rows, float32, and gains of another dtype. So is each field of the batch
that this file does not know of.
"""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor

from specengine.kernels.attention.types import HeadNorms, PagedBatch
from specengine.kernels.cuda import program
from specengine.kernels.cuda.program import compiled
from specengine.kernels.dispatch import (
    has_dependent_launch,
    has_much_shared,
    has_whole_device,
    multiprocessors,
)

_SOURCE = Path(__file__).parents[1] / "cuda" / "rope_attention.cu"
HEAD_DIM = 128
MOST_ROWS = 16  # queries x query heads of a KV head
_TILE = 8  # rows
_WARPS = 12
_MOST_BLOCKS = 16  # of a cluster; more than 8 are Hopper's
_UNIT = 16  # keys
_STRIDE = 2 * HEAD_DIM + 16  # bytes of a head in shared memory
_WIDE = 16  # bytes that the kernel loads at once from the cache
# What the kernel reads of a batch. Beside max_keys, which shapes nothing, and counters, which it
# does not need, other fields are refused unless they have their default.
_READ = frozenset(
    ["req_to_token", "req_pool_indices", "seq_lens", "qo_indptr", "positions", "max_queries"]
)
_IGNORED = frozenset(["max_keys", "counters"])
_LOG2_E = math.log2(math.e)
# Up to which it is taken; measured up to 4,000, and of 1 and 8 requests at 8,000.
_MOST_KEYS = 8448


def takes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin_cache: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    norms: HeadNorms | None,
) -> bool:
    """Whether the kernel computes this. What it was not written for it refuses."""
    is_plain = window is None and softcap is None and sinks is None
    known = _READ | _IGNORED
    others = (one for one in fields(batch) if one.name not in known)
    if not is_plain or any(getattr(batch, one.name) != one.default for one in others):
        return False
    dtypes = {one.dtype for one in (q, k, v, k_cache, v_cache)}
    if norms is not None:
        dtypes |= {norms.q_weight.dtype, norms.k_weight.dtype}
        if not all(_lies_in(one, 4) for one in (norms.q_weight, norms.k_weight)):
            return False
    tensors = batch.req_pool_indices, batch.seq_lens, batch.qo_indptr, batch.positions
    return (
        dtypes in ({torch.bfloat16}, {torch.float16})
        and q.shape[2] == HEAD_DIM
        and cos_sin_cache.shape[1] == HEAD_DIM
        and cos_sin_cache.dtype == torch.float32
        and batch.max_queries * (q.shape[1] // k.shape[1]) <= MOST_ROWS
        and q.shape[0] > 0
        and all(one.dtype == torch.int64 and one.is_contiguous() for one in tensors)
        and batch.req_to_token.dtype == torch.int32
        and batch.req_to_token.stride(-1) == 1
        and k_cache.stride() == v_cache.stride()
        and all(_lies_in(one, _WIDE) for one in (k_cache, v_cache))
        and all(_lies_in(one, 4) for one in (q, k, v))
        and _lies_in(cos_sin_cache, 8)
    )


def _lies_in(x: Tensor, size: int) -> bool:
    """Whether rows of x are whole, and begin at multiples of so many bytes."""
    starts = (x.data_ptr(), *(x.element_size() * one for one in x.stride()[:-1]))
    return x.stride(-1) == 1 and all(start % size == 0 for start in starts)


def is_faster(q: Tensor, kv_heads: int, batch: PagedBatch) -> bool:
    """Whether to take the kernel for what `takes` takes: where each block has a multiprocessor, as
    for up to 16 requests of an 8B. For more, Triton's programs are the faster
    (benchmarks/results/kernels.md: few-requests-attention). A captured round does not know how many
    keys there will be: its max_keys is what the engine's context allows."""
    if not (has_dependent_launch(q) and has_much_shared(q) and program.available()):
        return False
    groups = len(batch.seq_lens) * kv_heads
    has_room = has_whole_device() and groups <= multiprocessors(q.device)
    return has_room and batch.max_keys <= _MOST_KEYS


def _cluster(groups: int, device: torch.device) -> int:
    """Blocks that share the keys of each of so many KV heads of requests: as many as may run at
    once. Pairs can fill a GPU; of larger clusters a quarter of it may be left over, since a cluster
    does not leave its group of multiprocessors (GPC)."""
    cluster, room = 1, multiprocessors(device)
    while cluster < _MOST_BLOCKS:
        if 2 * cluster * groups > (room if cluster == 1 else 0.75 * room):
            break
        cluster *= 2
    return cluster


def _shared_bytes(rows: int, queries: int, cluster: int) -> int:
    """As the source lays it out: heads; units of keys and values; what the blocks send."""
    heads, units = rows + 2 * queries, _WARPS * 2 * _UNIT
    return 16 + (heads + units) * _STRIDE + rows * (4 * HEAD_DIM + 8 * cluster)


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
    norms: HeadNorms | None,
) -> Tensor:
    """Of what `takes` takes."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    kv_heads = k_cache.shape[1]
    group, queries, requests = q.shape[1] // kv_heads, batch.max_queries, len(batch.seq_lens)
    tiles, cluster = -(-group * queries // _TILE), _cluster(requests * kv_heads, q.device)
    defines = (
        ("TYPE", 0 if q.dtype == torch.bfloat16 else 1),
        ("GROUP", group),
        ("QUERIES", queries),
        ("TILES", tiles),
        ("CLUSTER", cluster),
        ("WARPS", _WARPS),
        ("NORM", int(norms is not None)),
    )
    shared = _shared_bytes(_TILE * tiles, queries, cluster)
    kernel = compiled(_SOURCE, "rope_attention", defines, shared, q.device.index or 0)
    rotated = q, k, v, out, batch.positions, cos_sin_cache, k_cache, v_cache, loc
    places = batch.req_to_token, batch.req_pool_indices, batch.seq_lens, batch.qo_indptr
    gains = (None, None) if norms is None else (norms.q_weight, norms.k_weight)
    strides = *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *k_cache.stride()[:2]
    tables = batch.req_to_token.stride(0), cos_sin_cache.stride(0)
    numbers = q.shape[1], scale * _LOG2_E, 0.0 if norms is None else norms.eps
    kernel.launch(
        (cluster * kv_heads, requests, 1),
        32 * _WARPS,
        shared,
        (*rotated, *places, *gains, *strides, *tables, *numbers),
    )
    return out
