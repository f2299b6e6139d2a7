"""Attention of ragged queries over paged K and V: decode, extend with prefix, verification.

Split KV with a merge by log-sum-exp after Flash-Decoding (Dao et al. 2023); online softmax after
FlashAttention-2 (Dao 2023).
"""

from __future__ import annotations

from torch import Tensor

from specengine.kernels.attention import paged_attention_ref
from specengine.kernels.attention.types import PagedBatch
from specengine.kernels.dispatch import Backend, use_triton


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    scale: float,
    *,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    num_splits: int | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """The queries of a request are its last tokens, n of its seq_len::

        for b in range(B):
            prefix = seq_lens[b] - n
            for i in range(n):
                seen = [c for c in range(seq_lens[b]) if c < prefix or c - prefix <= i]
                # with first_keys: also c >= min(first_keys[req_pool_indices[b]], prefix)
                # under a tree: c < first or tree_mask[b, i, c - first], first = prefix - num_past
                # with a window: also position(c) > position(prefix + i) - window, or c a past node
                # with a chunk: also both positions // chunk equal, or c a past node
                slots = req_to_token[req_pool_indices[b], seen]
                for h in range(Hq):
                    scores = scale * q[t, h] . k_cache[slots, h // group]
                    # with a softcap: scores = softcap * tanh(scores / softcap)
                    weights = softmax(scores)    # with sinks: of (scores, sinks[h])
                    out[t, h] = weights . v_cache[slots, h // group]     # t = qo_indptr[b] + i

    q: [T, Hq, D], the last dimension contiguous; k_cache, v_cache: [S, Hk, D] of q's dtype
    (float32, float16, bfloat16), or float8_e4m3fn, whose values are taken as they are; Hk divides
    Hq; D up to 256. Returns [T, Hq, D]; rows of q that belong to no request are undefined. Softmax
    in float32. A window and a chunk exclude each other. sinks: [Hq], logits beside the scores that
    have no value.

    num_splits: programs that share a request's keys; None chooses from the host's bounds. Any
    device; Triton on CUDA: one kernel, which reads lengths and page table on the device, so that a
    captured graph stays right while they change. Forwards that share `counters` must not overlap.
    """
    if use_triton(backend, q):
        from specengine.kernels.attention import paged_attention_triton

        return paged_attention_triton.paged_attention(
            q,
            k_cache,
            v_cache,
            batch,
            scale,
            window,
            softcap,
            sinks,
            num_splits,
            chunk,
        )
    return paged_attention_ref.paged_attention(
        q, k_cache, v_cache, batch, scale, window, softcap, sinks, chunk
    )
