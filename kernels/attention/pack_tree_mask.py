"""Masks of trees over all keys, a bit each, for kernels that know no shorter form."""

from __future__ import annotations

from torch import Tensor

from specengine.kernels.attention import pack_tree_mask_ref
from specengine.kernels.dispatch import Backend, use_triton


def pack_tree_mask(
    mask_BNM: Tensor,
    num_queries_B: Tensor,
    seq_lens_B: Tensor,
    starts_B: Tensor,
    out: Tensor,
    most: int,
    *,
    backend: Backend = "auto",
) -> None:
    """Write which keys each query sees, query after query, least significant bit first::

        for b in range(B):
            n, keys = num_queries[b], seq_lens[b]
            first = keys - n - (M - N)                  # keys before the tree
            for i in range(n * keys):
                query, key = divmod(i, keys)
                seen = key < first or mask[b, query, key - first]
                set bit i % 8 of out[starts[b] + i // 8] to seen

    mask_BNM: bool, contiguous, M - N of its columns being nodes that are keys only; num_queries,
    seq_lens: int64 [B]; starts: int32 [B], bytes; out: uint8. most: bytes of a request at most;
    the bits that fill up its last byte are 0. Any device; Triton on CUDA, which reads all lengths
    on the device.
    """
    if use_triton(backend, mask_BNM):
        from specengine.kernels.attention import pack_tree_mask_triton

        pack_tree_mask_triton.pack_tree_mask(
            mask_BNM, num_queries_B, seq_lens_B, starts_B, out, most
        )
    else:
        pack_tree_mask_ref.pack_tree_mask(mask_BNM, num_queries_B, seq_lens_B, starts_B, out)
