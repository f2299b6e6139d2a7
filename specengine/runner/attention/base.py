"""What the attention backends share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Self

from torch import Tensor

from specengine.core.batch import AttnPlan, ForwardBatch
from specengine.core.forward_mode import ForwardMode
from specengine.core.interfaces import AttentionLayer
from specengine.kernels.attention.types import Expansion, PagedBatch


class OneForward(ABC):
    """Base of backends that neither rotate nor write KV, and decode by an extend of one token."""

    def for_mode(self, mode: ForwardMode) -> Self:
        return self

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def forward_fused(
        self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer, batch: ForwardBatch
    ) -> Tensor | None:
        return None

    def paged_batch(self, batch: ForwardBatch) -> PagedBatch | None:
        return None

    def forward_decode(self, q: Tensor, layer: AttentionLayer, batch: ForwardBatch) -> Tensor:
        return self.forward_extend(q, layer, batch)

    @abstractmethod
    def forward_extend(self, q: Tensor, layer: AttentionLayer, batch: ForwardBatch) -> Tensor: ...


def attach_plan(
    backend: str, batch: ForwardBatch, metadata: Any, expansion: Expansion | None = None
) -> AttnPlan:
    """Puts a plan for this batch on the batch. It is made on the current stream."""
    plan = AttnPlan(
        backend=backend,
        mode=batch.forward_mode,
        batch_size=batch.batch_size,
        num_tokens=batch.num_tokens,
        metadata=metadata,
        expansion=expansion,
    )
    batch.attn_plan = plan
    return plan
