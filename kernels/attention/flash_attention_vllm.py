"""FlashAttention 3 as vLLM brings it: the same function, with its arguments in another order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specengine.kernels.attention.flash_merge import SINKS_DTYPE, beside_sinks
from specengine.kernels.attention.types import FlashKeys, FlashOutput

_UNUSED: dict[str, Any] = dict.fromkeys(
    (
        *("k_new", "v_new", "q_v", "out", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q"),
        *("leftpad_k", "rotary_cos", "rotary_sin", "seqlens_rotary"),
        *("q_descale", "k_descale", "v_descale", "scheduler_metadata", "pack_gqa"),
        "cp_tot_seqused_k",
    )
)


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
    out, lse, *_ = torch.ops._vllm_fa3_C.fwd(
        q,
        k_cache.unsqueeze(1),
        v_cache.unsqueeze(1),
        cu_seqlens_q=keys.qo_indptr,
        seqused_k=keys.seq_lens,
        max_seqlen_q=keys.max_queries,
        max_seqlen_k=keys.max_keys,
        page_table=keys.table,
        kv_batch_idx=keys.rows,
        softmax_scale=scale,
        is_causal=keys.causal,
        window_size_left=-1 if window is None else window - 1,
        window_size_right=-1 if window is None else 0,
        softcap=softcap or 0.0,
        is_rotary_interleaved=False,
        num_splits=0,
        sm_margin=0,
        s_aux=sinks if is_taken else None,
        cp_world_size=1,
        cp_rank=0,
        **_UNUSED,
    )
    return beside_sinks(FlashOutput(out, lse), None if is_taken else sinks)
