"""One forward of prompts that runs a few layers at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from specengine.core.batch import ForwardBatch, ScheduleBatch
from specengine.runner.split_streams import Call


@dataclass(eq=False)
class SplitJob:
    """A forward under way. Its state is on the batch. kept: places of the requests that have not
    left it."""

    batch: ScheduleBatch
    on_device: ForwardBatch
    kept: list[int]
    hidden: Tensor | None = None  # [T, H], after the last layer
    last: Call | None = None

    @property
    def num_tokens(self) -> int:
        return sum(self.batch.extend_lens)

    @property
    def is_ready(self) -> bool:
        """Whether its head may be launched on the current stream. The last layers may still run;
        the stream then waits for them."""
        return self.hidden is not None and self.last is not None and self.last.is_readable

    @property
    def rank(self) -> tuple[int, int]:
        return min(self.batch.reqs[place].rank for place in self.kept)

    @property
    def kept_rows(self) -> list[int]:
        """Of the tokens of requests that have not left."""
        ends = [*accumulate(self.batch.extend_lens)]
        return [r for i in self.kept for r in range(ends[i] - self.batch.extend_lens[i], ends[i])]

    @torch.inference_mode()
    def forget(self, places: Sequence[int]) -> None:
        """Layers to come write these requests' keys and values to slot 0, which no request owns."""
        batch = self.on_device
        ends = [*accumulate(batch.extend_lens_cpu)]
        for place in places:
            batch.out_cache_loc[ends[place] - batch.extend_lens_cpu[place] : ends[place]] = 0
