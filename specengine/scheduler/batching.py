"""Requests into batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from specengine.core.batch import ScheduleBatch
from specengine.core.forward_mode import ForwardMode
from specengine.core.request import Req
from specengine.core.sampling_batch import SamplingBatch
from specengine.kernels.delta.types import Save
from specengine.scheduler.admission import Chunk


class BatchBuilder:
    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._decoded: list[Req] = []  # requests of the last decode batch
        self._decode_sampling: SamplingBatch | None = None

    def prefill(
        self, chunks: list[Chunk], riders: list[Req], is_split: bool = False
    ) -> ScheduleBatch:
        """Prompt chunks; `riders` are running requests that decode one token along with them.
        is_split: layers run a few at a time."""
        reqs = [chunk.req for chunk in chunks]
        starts = [req.kv_len for req in reqs]
        ends = [chunk.req.kv_len + chunk.length for chunk in chunks]
        runs = [req.tokens(*span) for req, *span in zip(reqs, starts, ends, strict=True)]
        samples = [
            end == req.prefill_len and not req.output_ids
            for req, end in zip(reqs, ends, strict=True)
        ]
        state_saves = [
            Save(index, length - chunk.req.kv_len, slot)
            for index, chunk in enumerate(chunks)
            for length, slot in chunk.saves
        ]
        reqs += riders
        mode = ForwardMode.SPLIT_PREFILL if is_split else ForwardMode.EXTEND
        return ScheduleBatch(
            reqs=reqs,
            forward_mode=ForwardMode.MIXED if riders else mode,
            input_ids=_joined([*runs, [req.last_token for req in riders]]),
            prefix_lens=starts + [req.kv_len for req in riders],
            extend_lens=[chunk.length for chunk in chunks] + [1] * len(riders),
            samples=samples + [True] * len(riders),
            sampling=SamplingBatch.from_reqs(reqs, self.vocab_size, self.device),
            state_saves=tuple(state_saves),
        )

    def narrowed(self, batch: ScheduleBatch, kept: Sequence[int]) -> ScheduleBatch:
        """The same forward as of these requests alone, by their places in it."""
        reqs = [batch.reqs[place] for place in kept]
        ends = [*accumulate(batch.extend_lens)]
        runs = [batch.input_ids[ends[i] - batch.extend_lens[i] : ends[i]] for i in kept]
        return replace(
            batch,
            reqs=reqs,
            input_ids=_joined(runs),
            prefix_lens=[batch.prefix_lens[place] for place in kept],
            extend_lens=[batch.extend_lens[place] for place in kept],
            samples=[batch.samples[place] for place in kept],
            sampling=SamplingBatch.from_reqs(reqs, self.vocab_size, self.device),
            state_saves=(),  # of the forward, which has run
        )

    def decode(self, running: list[Req]) -> ScheduleBatch:
        """One round: the last token of each request is its root."""
        reqs = list(running)
        return ScheduleBatch(
            reqs=reqs,
            forward_mode=ForwardMode.DECODE,
            input_ids=[req.last_token for req in reqs],
            prefix_lens=[req.kv_len for req in reqs],
            extend_lens=[1] * len(reqs),
            samples=[True] * len(reqs),
            sampling=self._sampling_of(reqs),
        )

    def _sampling_of(self, reqs: list[Req]) -> SamplingBatch:
        if self._decode_sampling is not None and self._decoded == reqs:
            self._decode_sampling.refresh(reqs)
        else:
            self._decode_sampling = SamplingBatch.from_reqs(reqs, self.vocab_size, self.device)
            self._decoded = reqs
        return self._decode_sampling


def _joined(runs: Sequence[ArrayLike]) -> NDArray[np.int64]:
    return np.concatenate([np.asarray(run, dtype=np.int64) for run in runs])
