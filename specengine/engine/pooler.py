"""Vectors of prompts, from the hidden states of their prefill."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.core.batch import ScheduleBatch
from specengine.core.interfaces import LogitsOutput
from specengine.core.pooling import Pooling


class Pooler:
    """The vector of one prompt, whose hidden states come chunk by chunk."""

    def __init__(self, pooling: Pooling) -> None:
        self.pooling = pooling
        self._sum: Tensor | None = None  # float32 [H]
        self._count = 0

    def add(self, hidden_TH: Tensor, start: int) -> None:
        """Hidden states of the tokens from place `start` on. A prompt may begin anew."""
        rows = hidden_TH.float()
        if not self.pooling.needs_all:
            rows, start = rows[-1:], 0
        if start == 0:
            self._sum, self._count = torch.zeros_like(rows[0]), 0
        assert self._sum is not None, "the first chunk of a prompt is seen"
        self._sum += rows.sum(0)
        self._count += len(rows)

    def vector(self) -> list[float]:
        """float32 [H]."""
        assert self._sum is not None, "the prompt was run"
        vector = self._sum / self._count
        if self.pooling.normalises:
            vector = torch.nn.functional.normalize(vector, dim=0)
        values: list[float] = vector.tolist()
        return values


def pool_prefill(poolers: list[Pooler | None], batch: ScheduleBatch, output: LogitsOutput) -> None:
    """poolers: of the requests of the batch, None where no vector is wanted."""
    end = 0
    for pooler, length, start in zip(poolers, batch.extend_lens, batch.prefix_lens, strict=True):
        begin, end = end, end + length
        if pooler is not None:
            assert output.hidden is not None, "a prefill gives hidden states"
            pooler.add(output.hidden[begin:end], start)
