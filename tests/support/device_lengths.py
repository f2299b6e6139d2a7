"""An attention backend for captured forwards on a CPU."""

from __future__ import annotations

from torch import Tensor

from specengine.core.batch import ForwardBatch
from specengine.core.interfaces import AttentionLayer
from specengine.kernels.attention.types import HeadNorms, PagedBatch
from specengine.runner.attention.triton_backend import TritonAttentionBackend
from tests.support.padded_attention import attention


class DeviceLengths(TritonAttentionBackend):
    """Reads lengths from the batch's tensors alone, as the Triton backend does."""

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
        return attention(
            q,
            *caches,
            paged,
            layer.scale,
            layer.sliding_window,
            layer.softcap,
            layer.sinks,
            chunk=layer.attention_chunk,
        )
