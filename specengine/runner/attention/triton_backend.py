"""One Triton kernel a layer, which reads lengths and page table on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.core.batch import AttentionBackend, AttnPlan, ForwardBatch
from specengine.core.interfaces import AttentionLayer, AttentionLimits
from specengine.kernels.attention import rope_attention
from specengine.kernels.attention.latent_attention import latent_attention
from specengine.kernels.attention.paged_attention import paged_attention
from specengine.kernels.attention.types import Expansion, HeadNorms, PagedBatch
from specengine.kernels.dispatch import has_triton, interprets_triton
from specengine.runner.attention.base import RegisteredBackend, attach_plan, require, require_cuda
from specengine.runner.attention.expansion import plan_expansion

# A batch with more groups (requests x KV heads x tiles of queries) fills any GPU unsplit.
_MAX_SPLIT_GROUPS = 4096


class TritonAttentionBackend(RegisteredBackend):
    """A plan only collects tensors: nothing is computed on the host or on replay.

    An instance serves one stream: its forwards share the counters that merge split keys.
    """

    name = "triton"
    limits = AttentionLimits(
        softcap=True,
        sinks=True,
        fp8_kv=True,
        first_keys=True,
        precompiles=True,
        shared_kv=True,
        chunks=True,
    )

    def __init__(self, device: torch.device) -> None:
        self.counters = torch.zeros(_MAX_SPLIT_GROUPS, dtype=torch.int32, device=device)

    @classmethod
    def for_device(cls, device: torch.device) -> AttentionBackend:
        require(has_triton(), "triton")
        if not interprets_triton():
            require_cuda(device, "triton")
        return cls(device)

    def init_forward_metadata(self, batch: ForwardBatch) -> AttnPlan:
        return self._plan(batch, batch.max_seq_len, plan_expansion(batch))

    def init_forward_metadata_capture(self, batch: ForwardBatch) -> AttnPlan:
        """Launches are sized for the longest request that the page table can hold. Partial results
        of split keys lie in the graph's pool."""
        return self._plan(batch, batch.req_to_token_pool.req_to_token.shape[1])

    def forward_fused(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        norms: HeadNorms | None,
    ) -> Tensor | None:
        assert batch.attn_plan is not None, "init_forward_metadata comes first"
        paged: PagedBatch = batch.attn_plan.metadata
        if layer.rotary is None or layer.attention_chunk is not None:
            return None
        angles, window = layer.rotary.cos_sin_cache, layer.sliding_window
        if not rope_attention.fits(q, layer.num_kv_heads, angles, paged, window):
            return None
        k_cache, v_cache = batch.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        return rope_attention.rope_attention(
            q, k, v, angles, k_cache, v_cache, batch.out_cache_loc, paged, layer.scale,
            window=window, softcap=layer.softcap, sinks=layer.sinks, norms=norms,
        )  # fmt: skip

    def paged_batch(self, batch: ForwardBatch) -> PagedBatch | None:
        assert batch.attn_plan is not None, "init_forward_metadata comes first"
        batch.attn_plan.check(batch)
        paged: PagedBatch = batch.attn_plan.metadata
        return paged

    def forward_extend(self, q: Tensor, layer: AttentionLayer, batch: ForwardBatch) -> Tensor:
        assert batch.attn_plan is not None, "init_forward_metadata comes first"
        k_cache, v_cache = batch.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        paged: PagedBatch = batch.attn_plan.metadata
        if layer.value_dim is not None:
            return latent_attention(
                q, k_cache, layer.value_dim, paged, layer.scale, backend="triton"
            )
        return paged_attention(
            q, k_cache, v_cache, paged, layer.scale,
            window=layer.sliding_window, chunk=layer.attention_chunk, softcap=layer.softcap,
            sinks=layer.sinks, backend="triton",
        )  # fmt: skip

    def _plan(
        self, batch: ForwardBatch, max_keys: int, expansion: Expansion | None = None
    ) -> AttnPlan:
        tree_mask, num_past = None, 0
        if batch.tree is not None:
            num_past = batch.tree.num_past
            tree_mask = batch.tree.mask_BNN.to(self.counters.device).contiguous()
        paged = PagedBatch(
            req_to_token=batch.req_to_token_pool.req_to_token,
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            qo_indptr=batch.qo_indptr,
            positions=batch.positions,
            max_queries=batch.max_extend_len,
            max_keys=max_keys,
            tree_mask=tree_mask,
            num_past=num_past,
            first_keys=batch.first_keys,
            counters=self.counters,
        )
        return attach_plan(self.name, batch, paged, expansion)
