"""Ranks that have requests of their own and share experts (data-parallel attention)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from specengine.core.parallel import Communicator


class ExpertSharers:
    """Each rank keeps attention whole, and some intermediate features of every expert.

    A forward of a model with experts is one of all ranks: their rows are gathered before the
    experts, and each takes its own rows of the sum behind them. So before a forward ranks say how
    many tokens they have. A rank that has none of them runs the model IDLE, on no tokens, and so
    does one that is about to run another model: the model with the lowest number runs first.
    A step of the engine ends when no rank has a forward left. No rank needs to know how many
    forwards another's step has.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.counts = [0] * communicator.size  # tokens of each rank in the forward that runs
        self.num_idle = 0  # forwards on no tokens that this rank has run
        self._runs = False
        self._run_idle: list[Callable[[], object]] = []  # by the model's number - 1
        self._was_busy = False

    def add_model(self, run_idle: Callable[[], object]) -> int:
        """Its number. All ranks add the same models in the same order."""
        self._run_idle.append(run_idle)
        return len(self._run_idle)

    @contextmanager
    def forward(self, model: int, num_tokens: int) -> Iterator[None]:
        """Around a forward of a model with at least one token. Waits for the other ranks."""
        while (turn := self._gather(model, num_tokens)) != model:
            self._idle(turn)
        self._runs = True
        try:
            yield
        finally:
            self._runs = False

    def end_step(self) -> bool:
        """Behind what this rank has to run in a step, be it nothing. Runs IDLE forwards until no
        rank has another. Gives whether any has run one since the last call."""
        while turn := self._gather(0, 0):
            self._idle(turn)
        was_busy, self._was_busy = self._was_busy, False
        return was_busy

    @property
    def runs(self) -> bool:
        """Whether a forward of all ranks runs: else a forward, on no tokens, is this rank's own."""
        return self._runs

    def rows_of_all(self, x: Tensor) -> Tensor:
        """[T, H] of this rank -> [sum of counts, H], by rank."""
        width, count = max(self.counts), len(x)
        if count < width:
            x = torch.cat([x, x.new_zeros(width - count, x.shape[1])])
        rows_SWH = self.communicator.all_gather(x)
        return torch.cat([rows[:n] for rows, n in zip(rows_SWH, self.counts, strict=True)])

    def own_rows(self, x: Tensor) -> Tensor:
        """[sum of counts, H] -> [T, H] of this rank."""
        rank = self.communicator.rank
        start = sum(self.counts[:rank])
        return x[start : start + self.counts[rank]]

    def _idle(self, model: int) -> None:
        self.num_idle += 1
        self._runs = True
        try:
            self._run_idle[model - 1]()
        finally:
            self._runs = False

    def _gather(self, model: int, num_tokens: int) -> int:
        """The number of the model that runs now, 0 where no rank has a forward."""
        size, rank = self.communicator.size, self.communicator.rank
        told = [0] * (2 * size)
        told[rank], told[size + rank] = model, num_tokens
        found = self.communicator.greatest(told)
        turn = min((one for one in found[:size] if one), default=0)
        pairs = zip(found[:size], found[size:], strict=True)
        self.counts = [count if one == turn else 0 for one, count in pairs]
        self._was_busy |= turn > 0
        return turn


_sharers: ContextVar[ExpertSharers | None] = ContextVar("sharers", default=None)


def expert_sharers() -> ExpertSharers | None:
    """Those of the layers that are made in this thread."""
    return _sharers.get()


@contextmanager
def sharing_experts(sharers: ExpertSharers | None) -> Iterator[None]:
    """Experts that are made inside are shared; all other layers stay whole."""
    token = _sharers.set(sharers)
    try:
        yield
    finally:
        _sharers.reset(token)
