"""What the attention backends share."""

from __future__ import annotations

from typing import Any

from specengine.core.batch import AttnPlan, ForwardBatch
from specengine.kernels.attention.types import Expansion


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
