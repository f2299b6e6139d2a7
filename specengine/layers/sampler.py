"""Chooses tokens from logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specengine.core.interfaces import LogitsOutput
from specengine.core.random_streams import Stream
from specengine.core.sampling_batch import SamplingBatch
from specengine.kernels.sample.sample_rows import sample_rows
from specengine.kernels.sample.types import ChoiceTable, DrawPlaces
from specengine.layers.logits import RowMap, edit_logits, row_chunks

ONE_TO_ONE = RowMap()


@dataclass(frozen=True)
class RowDraws:
    """What rows of edited logits ask of sampling, where it lies on the device. in_place: the logits
    may be written over."""

    table: ChoiceTable
    places: DrawPlaces
    in_place: bool = True


class Sample(Protocol):
    """Chooses the target's tokens: a Sampler, or ModelRunner.sample."""

    def __call__(
        self, output: LogitsOutput, sampling: SamplingBatch, rows: RowMap = ONE_TO_ONE
    ) -> Tensor:
        """-> int64 [R], one token a row of output.logits."""
        ...


class Sampler:
    """How the target's tokens are chosen, in plain decoding and verification alike.

    A greedy request takes the best token, the lowest id among equals. Any other inverts the
    cumulative distribution at one uniform keyed by its seed and the output position decided. On
    the same logits every device chooses the same, and so do rounds in graphs.
    """

    def __call__(
        self, output: LogitsOutput, sampling: SamplingBatch, rows: RowMap = ONE_TO_ONE
    ) -> Tensor:
        """-> int64 [R], one token a row of output.logits."""
        logits = output.logits
        if sampling.is_plain:
            return output.argmax if output.argmax is not None else logits.argmax(-1)
        chunks = list(row_chunks(*logits.shape))
        if len(chunks) <= 1:
            return self._choose(logits, sampling, rows)
        parts = [rows.part(chunk, len(logits), logits.device) for chunk in chunks]
        tokens = [
            self._choose(logits[chunk], sampling, part)
            for chunk, part in zip(chunks, parts, strict=True)
        ]
        return torch.cat(tokens)

    def _choose(self, logits_RV: Tensor, sampling: SamplingBatch, rows: RowMap) -> Tensor:
        edited_RV = edit_logits(logits_RV, sampling, rows)
        random = sampling.random
        if random is None:
            return edited_RV.argmax(-1)
        slots_R = rows.request_R
        if slots_R is None:
            slots_R = torch.arange(len(edited_RV), device=edited_RV.device)
        places = DrawPlaces(slots_R, self._positions(sampling, rows))
        return self.draw(edited_RV, RowDraws(random.table, places, edited_RV is not logits_RV))

    def draw(self, edited_RV: Tensor, draws: RowDraws) -> Tensor:
        """-> int64 [R], one token a row, in captures too. Greedy requests take the best."""
        given = edited_RV, draws.table, draws.places, int(Stream.SAMPLE)
        return sample_rows(*given, in_place=draws.in_place)

    def _positions(self, sampling: SamplingBatch, rows: RowMap) -> Tensor:
        """int64 [R], of the output tokens that are decided."""
        return rows.output_pos(sampling)
