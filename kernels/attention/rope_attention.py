"""Norms of heads, rotation, KV write and attention of few new tokens a request: decode and
verification.

What norm_heads, rope_store_kv and paged_attention do, in one kernel that a small model waits for
once. Triton's takes every case; that of CUDA C++ takes the common case of some requests, on Hopper.
"""

from __future__ import annotations

from torch import Tensor

from specengine.kernels.attention import rope_attention_cuda
from specengine.kernels.attention.head_norms import norm_heads
from specengine.kernels.attention.paged_attention import paged_attention
from specengine.kernels.attention.rope import rope_store_kv
from specengine.kernels.attention.types import HeadNorms, PagedBatch
from specengine.kernels.dispatch import Backend, use_triton

_Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
_Options = tuple[int | None, float | None, Tensor | None, HeadNorms | None]

# Rows (queries x query heads of a KV head) of one program, or of a few that share them.
MAX_ROWS = 64
# Queries with heads wider than 128: more leave the kernel too few registers.
MOST_WIDE_QUERIES = 32
# Numbers of a head whose norms the kernel computes: wider ones leave it too few registers.
MOST_NORMED = 128


def has_registers(queries: int, group: int, head_dim: int) -> bool:
    """Whether the kernel has enough for a request's queries. group: query heads of a KV head."""
    return queries * group <= MAX_ROWS and (head_dim <= 128 or queries <= MOST_WIDE_QUERIES)


def fits(
    q: Tensor, num_kv_heads: int, cos_sin_cache: Tensor, batch: PagedBatch, window: int | None
) -> bool:
    """Whether the fused kernel can take q [T, Hq, D]: whole heads rotated, few queries, a tree
    neither half written nor under a window."""
    has_room = has_registers(batch.max_queries, q.shape[1] // num_kv_heads, q.shape[2])
    has_whole_tree = batch.tree_mask is None or (batch.num_past == 0 and window is None)
    is_whole_head = cos_sin_cache.shape[1] == q.shape[2]
    return has_room and is_whole_head and has_whole_tree and use_triton("auto", q)


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
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    norms: HeadNorms | None = None,
    num_splits: int | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """``paged_attention(rope_store_kv(q, k, v, ...), ...)``: arguments, shapes and result are
    theirs (positions: batch.positions), under the conditions of `fits`. With norms, q and k are
    ``norm_heads(q, k, norms)``, to the same roundings; of heads wider than 128 in kernels before.

    With programmatic dependent launch the old keys are read before the kernel ahead has ended. So
    the KV of a prefix must not come from a kernel that signals its end early, as these do: between
    two forwards of a model there must be one that does not, such as any of PyTorch's.

    num_splits: of the keys, in Triton. Backend "cuda" raises ValueError for what it refuses.
    """
    tensors = q, k, v, cos_sin_cache, k_cache, v_cache
    options = window, softcap, sinks, norms
    if num_splits is None and _takes_cuda(backend, tensors, batch, options):
        return rope_attention_cuda.rope_attention(*tensors, loc, batch, scale, norms)
    if use_triton(backend, q):
        from specengine.kernels.attention import rope_attention_triton

        if norms is not None and q.shape[2] > MOST_NORMED:
            (q, k), norms = norm_heads(q, k, norms, backend="triton"), None
        return rope_attention_triton.rope_attention(
            q,
            k,
            v,
            cos_sin_cache,
            k_cache,
            v_cache,
            loc,
            batch,
            scale,
            window,
            softcap,
            sinks,
            norms,
            num_splits,
        )
    if norms is not None:
        q, k = norm_heads(q, k, norms, backend="torch")
    rotated = rope_store_kv(
        q, k, v, batch.positions, cos_sin_cache, k_cache, v_cache, loc, backend="torch"
    )
    return paged_attention(
        rotated,
        k_cache,
        v_cache,
        batch,
        scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        backend="torch",
    )


def _takes_cuda(backend: Backend, tensors: _Tensors, batch: PagedBatch, options: _Options) -> bool:
    """Whether the kernel in CUDA C++ is asked for, or is there and the faster one."""
    if backend == "auto":
        is_faster = rope_attention_cuda.is_faster(tensors[0], tensors[4].shape[1], batch)
        return is_faster and rope_attention_cuda.takes(*tensors, batch, *options)
    if backend == "cuda" and not rope_attention_cuda.takes(*tensors, batch, *options):
        raise ValueError('the kernel in CUDA C++ refuses this; leave the backend to "auto"')
    return backend == "cuda"
