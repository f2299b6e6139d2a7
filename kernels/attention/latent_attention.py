"""Absorbed latent attention over paged latents: decode, verification, short prompts.

DeepSeek-V2 (arXiv:2405.04434); keys shared out and merged as Flash-Decoding does (Dao et al. 2023).
"""

from __future__ import annotations

from torch import Tensor

from specengine.kernels.attention import paged_attention_ref
from specengine.kernels.attention.types import PagedBatch
from specengine.kernels.dispatch import Backend, use_triton


def latent_attention(
    q: Tensor,
    cache: Tensor,
    value_dim: int,
    batch: PagedBatch,
    scale: float,
    *,
    num_splits: int | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """`paged_attention` with one head of keys, of which the first value_dim numbers are the values.

    q: [T, H, D], the last dimension contiguous; cache: [S, 1, D] of q's dtype (float32, float16,
    bfloat16), or float8_e4m3fn. Returns [T, H, value_dim]; rows of q that belong to no request are
    undefined. Softmax in float32. num_splits: programs that share a request's keys; None chooses
    from the host's bounds. Any device; Triton on CUDA, where each key is read once for as many rows
    of queries and heads as a program holds, and lengths and page table are read on the device.
    """
    if use_triton(backend, q):
        from specengine.kernels.attention import latent_attention_triton

        return latent_attention_triton.latent_attention(
            q, cache, value_dim, batch, scale, num_splits
        )
    values = cache[..., :value_dim]
    return paged_attention_ref.paged_attention(q, cache, values, batch, scale, None)
