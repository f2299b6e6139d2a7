"""FlashAttention 3 as sglang-kernel brings it."""

from __future__ import annotations

from sgl_kernel.flash_attn import flash_attn_with_kvcache
from torch import Tensor

from specengine.kernels.attention.flash_merge import SINKS_DTYPE, beside_sinks
from specengine.kernels.attention.types import FlashKeys, FlashOutput


def flash_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    keys: FlashKeys,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> FlashOutput:
    is_taken = sinks is not None and sinks.dtype == SINKS_DTYPE
    out, lse, *_ = flash_attn_with_kvcache(
        q,
        k_cache.unsqueeze(1),
        v_cache.unsqueeze(1),
        cache_seqlens=keys.seq_lens,
        cache_batch_idx=keys.rows,
        page_table=keys.table,
        cu_seqlens_q=keys.qo_indptr,
        max_seqlen_q=keys.max_queries,
        softmax_scale=scale,
        causal=keys.causal,
        window_size=(-1, -1) if window is None else (window - 1, 0),
        softcap=softcap or 0.0,
        return_softmax_lse=True,
        sinks=sinks if is_taken else None,
    )
    return beside_sinks(FlashOutput(out, lse), None if is_taken else sinks)
