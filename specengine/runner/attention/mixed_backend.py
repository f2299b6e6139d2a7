"""The Triton kernel for rounds, FlashAttention for long prompts: each where measured faster."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.core.batch import AttnPlan, ForwardBatch
from specengine.core.interfaces import AttentionLayer
from specengine.kernels import precompile
from specengine.kernels.attention.types import FlashAttention, HeadNorms, PagedBatch
from specengine.runner.attention.base import attach_plan
from specengine.runner.attention.flash_backend import FlashAttentionBackend, FlashPlan
from specengine.runner.attention.triton_backend import TritonAttentionBackend

# Queries x keys of the longest request from which FlashAttention is faster (benchmarks/results,
# attention-backends: slower by a quarter at 512 x 512, 1.4 to 2.5 times faster from 4 M on).
_LEAST_WORK = 1 << 20
# Of prompts in graphs, whose keys may be as many as the page table holds: so many queries.
_LEAST_CAPTURED = 768


class MixedAttentionBackend(TritonAttentionBackend):
    """The plan's type selects the kernel. Decode, verification, trees, and graphs of all but the
    longest prompts use Triton."""

    def __init__(self, device: torch.device, flash: FlashAttention) -> None:
        super().__init__(device)
        self.flash = FlashAttentionBackend(flash)

    def init_forward_metadata(self, batch: ForwardBatch) -> AttnPlan:
        work = batch.max_extend_len * batch.max_seq_len
        if work >= _LEAST_WORK and self._suits_flash(batch):
            return attach_plan(self.name, batch, FlashPlan(batch.max_seq_len))
        return super().init_forward_metadata(batch)

    def init_forward_metadata_capture(self, batch: ForwardBatch) -> AttnPlan:
        if batch.max_extend_len >= _LEAST_CAPTURED and self._suits_flash(batch):
            context = batch.req_to_token_pool.req_to_token.shape[1]
            return attach_plan(self.name, batch, FlashPlan(context))
        return super().init_forward_metadata_capture(batch)

    def forward_fused(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        norms: HeadNorms | None,
    ) -> Tensor | None:
        if self._is_flash(batch):
            return None
        return super().forward_fused(q, k, v, layer, batch, norms)

    def paged_batch(self, batch: ForwardBatch) -> PagedBatch | None:
        return None if self._is_flash(batch) else super().paged_batch(batch)

    def forward_extend(self, q: Tensor, layer: AttentionLayer, batch: ForwardBatch) -> Tensor:
        if self._is_flash(batch):
            # FlashAttention has nothing to compile, and cannot be called while kernels are: tensors
            # that it returns undefined do not pass through a TorchDispatchMode.
            if precompile.current() is not None:
                return q.new_zeros(q.shape)
            return self.flash.forward_extend(q, layer, batch)
        return super().forward_extend(q, layer, batch)

    def _is_flash(self, batch: ForwardBatch) -> bool:
        return batch.attn_plan is not None and isinstance(batch.attn_plan.metadata, FlashPlan)

    def _suits_flash(self, batch: ForwardBatch) -> bool:
        if batch.tree is not None or batch.first_keys is not None or not batch.attn_layers:
            return False
        limits = self.flash.limits
        assert limits.dtypes is not None
        assert limits.head_dims is not None
        k_cache, _ = batch.token_to_kv_pool.get_kv_buffer(batch.attn_layers[0].layer_id)
        heads = {layer.head_dim for layer in batch.attn_layers}
        has_chunks = any(layer.attention_chunk is not None for layer in batch.attn_layers)
        return k_cache.dtype in limits.dtypes and heads <= limits.head_dims and not has_chunks
