"""An attention backend for captured forwards on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.core.batch import AttentionBackend, ForwardBatch
from specengine.core.interfaces import AttentionLayer
from specengine.kernels.attention.paged_attention_ref import paged_attention
from specengine.kernels.attention.types import HeadNorms, PagedBatch
from specengine.runner.attention.triton_backend import TritonAttentionBackend
from tests.support.padded_attention import Reading, padded_attention, read


class DeviceLengths(TritonAttentionBackend):
    """Reads lengths from the batch's tensors alone, as the Triton backend does; once for the layers
    of a forward, which come in their order. One request alone is faster by the reference, which
    alone computes chunks."""

    unguarded = ("_last",)

    _last: tuple[PagedBatch, int | None, int, Reading] | None = None

    @classmethod
    def for_device(cls, device: torch.device) -> AttentionBackend:
        return cls(device)

    def forward_fused(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        norms: HeadNorms | None,
    ) -> Tensor | None:
        return None

    def forward_extend(self, q: Tensor, layer: AttentionLayer, batch: ForwardBatch) -> Tensor:
        assert batch.attn_plan is not None
        paged: PagedBatch = batch.attn_plan.metadata
        caches = batch.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        given = paged, layer.scale, layer.sliding_window, layer.softcap, layer.sinks
        if layer.attention_chunk is not None or len(paged.req_pool_indices) == 1:
            return paged_attention(q, *caches, *given, layer.attention_chunk)
        return padded_attention(q, *caches, *given, self._reading(paged, layer, len(q)))

    def _reading(self, paged: PagedBatch, layer: AttentionLayer, total: int) -> Reading:
        """A later layer of the forward before it sees the same; the first one is another forward's,
        of tensors that may have changed."""
        window = layer.sliding_window
        if self._last is not None:
            batch, before, number, reading = self._last
            if batch is paged and before == window and layer.layer_id > number:
                self._last = batch, window, layer.layer_id, reading
                return reading
        found = read(paged, total, window)
        self._last = paged, window, layer.layer_id, found
        return found
