"""Held-out documents."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch

from specengine.core.errors import ConfigError
from specengine.draft.train.data.dataset import TokenDataset
from specengine.draft.train.data.packing import PackedBatch, batches_in_order
from specengine.draft.train.processes import Processes
from specengine.draft.train.task import Sums, TrainTask


def take_batches(held_out: TokenDataset, batch_tokens: int, count: int) -> list[PackedBatch]:
    """The first `count` at most. Raises ConfigError where there is none."""
    batches = list(islice(batches_in_order(held_out, batch_tokens), count))
    if not batches:
        raise ConfigError(
            "no document was held out to evaluate on; raise data.held_out, or add documents"
        )
    return batches


def evaluate(
    task: TrainTask, batches: Sequence[PackedBatch], processes: Processes
) -> dict[str, float]:
    """The task's summary over the batches. Every process runs all of them: the result is the same,
    and what is drawn meanwhile leaves the run's random streams alone."""
    sums: Sums = {}
    task.module.eval()
    with torch.no_grad(), torch.random.fork_rng(processes.random_devices):
        for batch in batches:
            for name, value in task.evaluate(batch.to(processes.device)).items():
                sums[name] = sums[name] + value if name in sums else value
    task.module.train()
    return task.summary(sums)
