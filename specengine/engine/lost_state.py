"""A step that fails: recurrent state of its requests may be before it, behind it, or between."""

from __future__ import annotations

from specengine.engine.pipeline import RoundPipeline
from specengine.scheduler.scheduler import Scheduler


def start_anew(scheduler: Scheduler, pipeline: RoundPipeline | None) -> None:
    """After a step that failed. KV may be written again by the same step; state that has moved on
    may not be moved on twice, so that requests go back to the queue and run their texts again. Of
    targets without such state they stay."""
    has_in_flight = pipeline is not None and pipeline.has_in_flight
    if scheduler.ledger.snapshots is not None and not has_in_flight:
        scheduler.retract_all()
