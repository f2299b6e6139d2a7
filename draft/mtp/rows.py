"""Which rows the layers of a chain run, each one token further ahead than the one before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from specengine.core.request import Req
from specengine.core.transfer import sent


@dataclass(frozen=True)
class LayerRows:
    """New rows of one layer: tokens[i], none empty, from row starts[i] on."""

    reqs: Sequence[Req]
    firsts: list[int]  # the row that each request began with; no layer has rows before it
    starts: list[int]
    tokens: list[list[int]]

    def of_next(self) -> LayerRows:
        """The next layer takes the same tokens a row earlier. Where there is no earlier row, the
        first token has no place in it."""
        kept = [
            (req, first, start - 1, run) if start > first else (req, first, start, run[1:])
            for req, first, start, run in zip(
                self.reqs, self.firsts, self.starts, self.tokens, strict=True
            )
            if start > first or len(run) > 1
        ]
        return LayerRows(
            reqs=[req for req, _, _, _ in kept],
            firsts=[first for _, first, _, _ in kept],
            starts=[start for _, _, start, _ in kept],
            tokens=[run for _, _, _, run in kept],
        )

    def inputs_of_next(self, waiting_BH: Tensor, states_TH: Tensor) -> Tensor:
        """What the next layer's rows continue: the state of the row before these, if there is one,
        and those of all these rows but the last, which waits until another token is known.

        waiting_BH: states of the last rows before these; states_TH: of these rows.
        """
        batch_size = len(self.reqs)
        counts = [len(run) for run in self.tokens]
        ends = accumulate(counts, initial=batch_size)
        index: list[int] = []
        spans = zip(self.starts, self.firsts, ends, counts, strict=False)
        for i, (start, first, row, count) in enumerate(spans):
            index += [i] if start > first else []
            index += range(row, row + count - 1)
        rows = sent(torch.tensor(index, dtype=torch.int64), states_TH.device)
        return torch.cat([waiting_BH, states_TH])[rows]
