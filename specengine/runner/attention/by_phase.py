"""One attention backend for prompts and another for rounds, as one object."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from specengine.core.batch import AttentionBackend, AttnPlan, ForwardBatch
from specengine.core.forward_mode import ForwardMode
from specengine.core.interfaces import AttentionLayer
from specengine.kernels.attention.types import HeadNorms, PagedBatch


class PhasedAttentionBackend(AttentionBackend):
    """`prefill` serves the modes that take prompt tokens in (EXTEND, MIXED, SPLIT_PREFILL),
    `decode` all others: decoding, verification and drafting. Both read one KV layout.

    A plan carries this object's name, and the metadata of the backend that made it.
    """

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend) -> None:
        self.prefill = prefill
        self.decode = decode
        self.name = f"{prefill.name} for prompts, {decode.name} for rounds"
        precompiles = prefill.limits.precompiles and decode.limits.precompiles
        self.limits = replace(decode.limits, precompiles=precompiles)

    def for_mode(self, mode: ForwardMode) -> AttentionBackend:
        return (self.prefill if mode.is_prefill() else self.decode).for_mode(mode)

    def init_forward_metadata(self, batch: ForwardBatch) -> AttnPlan:
        return self._named(batch, self.for_mode(batch.forward_mode).init_forward_metadata(batch))

    def init_forward_metadata_capture(self, batch: ForwardBatch) -> AttnPlan:
        backend = self.for_mode(batch.forward_mode)
        return self._named(batch, backend.init_forward_metadata_capture(batch))

    def init_forward_metadata_replay(self, batch: ForwardBatch, plan: AttnPlan) -> None:
        self.for_mode(batch.forward_mode).init_forward_metadata_replay(batch, plan)

    def forward_fused(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        norms: HeadNorms | None,
    ) -> Tensor | None:
        return self.for_mode(batch.forward_mode).forward_fused(q, k, v, layer, batch, norms)

    def paged_batch(self, batch: ForwardBatch) -> PagedBatch | None:
        return self.for_mode(batch.forward_mode).paged_batch(batch)

    def forward_decode(self, q: Tensor, layer: AttentionLayer, batch: ForwardBatch) -> Tensor:
        return self.for_mode(batch.forward_mode).forward_decode(q, layer, batch)

    def forward_extend(self, q: Tensor, layer: AttentionLayer, batch: ForwardBatch) -> Tensor:
        return self.for_mode(batch.forward_mode).forward_extend(q, layer, batch)

    def _named(self, batch: ForwardBatch, plan: AttnPlan) -> AttnPlan:
        batch.attn_plan = replace(plan, backend=self.name)
        return batch.attn_plan
