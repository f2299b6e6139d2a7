"""What the attention backends share."""

from __future__ import annotations

from typing import Any

from specengine.core.batch import AttnPlan, ForwardBatch


def attach_plan(backend: str, batch: ForwardBatch, metadata: Any) -> AttnPlan:
    """A plan made for this batch, on the current stream; the batch carries it from here on."""
    plan = AttnPlan(
        backend=backend,
        mode=batch.forward_mode,
        batch_size=batch.batch_size,
        num_tokens=batch.num_tokens,
        metadata=metadata,
    )
    batch.attn_plan = plan
    return plan
