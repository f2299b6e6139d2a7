"""What the training loop and the tasks know of each other.

The loop owns data order, optimiser, schedule, checkpoints and progress; a task owns a module and
what it should learn. Neither knows more of the other than is written here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from torch import Tensor, nn

if TYPE_CHECKING:
    from specengine.draft.train.data.packing import PackedBatch

Sums = dict[str, Tensor]


@dataclass
class TaskLoss:
    """What a batch taught.

    The loop weighs batches by `count`, so that neither gradient accumulation nor the number of
    processes changes what is learned: the step's loss is sum(loss * count) / sum(count).
    """

    loss: Tensor  # scalar with a gradient, the mean over `count` positions; 0 where there is none
    count: Tensor  # scalar, detached
    metrics: Sums = field(default_factory=dict)  # detached scalar sums, such as "accuracy"
    counts: Sums = field(default_factory=dict)  # what each of them is divided by; the same keys


class TrainTask(Protocol):
    """Something to train.

    The module is in float32 and in training mode; the loop moves it to the device, shards it over
    processes, and runs `loss` and `evaluate` under autocast. Parameters that do not require a
    gradient are neither optimised nor checkpointed. Forwards go through `module(...)` itself, not
    through other methods of it: sharded parameters are gathered there. Randomness comes from
    torch's generators alone, which checkpoints keep.
    """

    @property
    def name(self) -> str: ...

    @property
    def module(self) -> nn.Module: ...

    def loss(self, batch: PackedBatch) -> TaskLoss:
        """The batch's tensors are on the device."""
        ...

    def evaluate(self, batch: PackedBatch) -> Sums:
        """Sums over a held-out batch, detached scalars that add up over batches and processes."""
        ...

    def summary(self, sums: Sums) -> dict[str, float]:
        """Ratios out of added sums. `loss` is one of them, in nats a position."""
        ...

    def export(self, directory: Path) -> None:
        """Write the current weights in Hugging Face layout, for the engine to load.
        The directory exists and is empty. While this runs, `module.named_parameters()` are
        whole where they are sharded otherwise; state_dict() would shard them."""
        ...
