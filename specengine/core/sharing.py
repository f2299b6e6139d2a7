"""Ranks that have requests of their own and share experts (data-parallel attention)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specengine.core.parallel import Communicator

NOTHING, ROUND, MEETING = 0, 1 << 20, 1 << 21  # in place of a model's number


class NextRun(NamedTuple):
    """What a rank has to run next. Ranks exchange it as it is: integers alone."""

    model: int = NOTHING  # the number of one whose forward it is, ROUND or MEETING
    num_tokens: int = 0  # of a forward
    batch_size: int = 0  # of a round, padded; as are those below
    num_steps: int = 0
    features: int = 0  # what its requests ask for, by which ranks may differ
    in_flight: int = 0  # whether this rank has launched a round that it has not collected


class RoundShape(NamedTuple):
    """What rounds of all ranks have in common, so that their collectives match."""

    batch_size: int
    num_steps: int


class SharedRounds(Protocol):
    """The device rounds of a rank, whole in a graph each."""

    def ensure_captured(
        self, shape: RoundShape, features: Sequence[int], may_capture: bool
    ) -> bool:
        """Capture, on all ranks alike, what rounds of this shape with any of these features lack.
        False where something is lacking that may not be captured now."""
        ...

    def run_idle(self, shape: RoundShape) -> None:
        """Launch a round of no request."""
        ...


class ExpertSharers:
    """Each engine has its own attention, and each rank some intermediate features of every expert.
    "Rank" means an engine below: ranks of one engine (--tp-size) go in lock-step, and each talks to
    the rank of the same place in every other engine, so that all of them receive the same.

    A forward of a model with experts is one of all ranks: their rows are gathered before the
    experts, and each takes its own rows of the sum behind them. So before a forward ranks say what
    they have to run. The lowest number of a model runs first, and a rank that has no forward of it
    runs the model IDLE, on no tokens. No rank needs to know how many forwards another's step has.

    Whole rounds, which may be graphs, come last, all of one shape: the largest batch and the most
    steps that a rank asks for. A rank without requests launches a round of padding. So a step ends
    with a round, or when no rank has anything left.
    """

    def __init__(self, communicator: Communicator, experts: Communicator | None = None) -> None:
        """communicator: of one rank of each engine. experts: of all ranks of all engines, where an
        engine has several; each has a part of every expert."""
        self.communicator = communicator
        self.experts = experts or communicator
        self.rounds: SharedRounds | None = None  # set by engine/sharing.py, where there are any
        self.num_idle = 0  # forwards on no tokens, and rounds of none, that this rank has run
        self._counts: list[int] | None = None  # tokens of each rank; None: as many as this one's
        self._runs = False
        self._asked: list[NextRun] = []  # of all ranks, as gathered last
        self._run_idle: list[Callable[[], object]] = []  # by the model's number - 1
        self._was_busy = False
        self._step_is_over = False

    def forget_models(self) -> None:
        """Of an engine before, where another is built on the same weights."""
        self._run_idle.clear()
        self.rounds = None

    def add_model(self, run_idle: Callable[[], object]) -> int:
        """Its number. All ranks add the same models in the same order."""
        self._run_idle.append(run_idle)
        return len(self._run_idle)

    @contextmanager
    def forward(self, model: int, num_tokens: int) -> Iterator[None]:
        """Around a forward of a model with at least one token. Waits for the other ranks."""
        next_run = NextRun(model, num_tokens)
        while (turn := self._gather(next_run)) != model:
            self._idle(turn)
        with self._running(self._tokens_of(turn)):
            yield

    @contextmanager
    def evenly(self) -> Iterator[None]:
        """Around forwards that every rank runs, in one order and with as many tokens each: nothing
        is exchanged. Inside `forward` it changes nothing."""
        if self._runs:
            yield
            return
        with self._running(None):
            yield

    def round(self, next_run: NextRun) -> RoundShape | None:
        """Before this rank launches a round. Waits for its turn, and gives the shape of all ranks'
        rounds. None, of a rank that has a round in flight: collect it first, since a graph has to
        be captured."""
        while True:
            turn = self._gather(next_run)
            if turn != ROUND:
                self._idle(turn)
            elif (shape := self._prepared()) is not None:
                self._step_is_over = True
                return shape
            elif next_run.in_flight:
                return None

    def meet(self) -> None:
        """Wait until every rank has called this. Until then it runs IDLE forwards beside those that
        have not; none of its own rounds may be in flight."""
        while (turn := self._gather(NextRun(MEETING))) != MEETING:
            if turn != NOTHING:
                self._idle(turn)
        self._step_is_over = False

    def end_step(self) -> bool:
        """Behind what this rank has to run in a step, be it nothing. Runs IDLE forwards until no
        rank has another. Gives whether any has run one since the last call."""
        while not self._step_is_over and (turn := self._gather(NextRun())):
            self._idle(turn)
        was_busy, self._was_busy, self._step_is_over = self._was_busy, False, False
        return was_busy

    @property
    def runs(self) -> bool:
        """Whether a forward of all ranks runs: else a forward, on no tokens, is this rank's own."""
        return self._runs

    def rows_of_all(self, x: Tensor) -> Tensor:
        """[T, H] of this rank -> [sum of counts, H], by rank."""
        counts = self._counts
        if counts is None:
            return self.communicator.all_gather(x).reshape(-1, x.shape[1])
        width, count = max(counts), len(x)
        if count < width:
            x = torch.cat([x, x.new_zeros(width - count, x.shape[1])])
        rows_SWH = self.communicator.all_gather(x)
        return torch.cat([rows[:n] for rows, n in zip(rows_SWH, counts, strict=True)])

    def own_rows(self, x: Tensor) -> Tensor:
        """[sum of counts, H] -> [T, H] of this rank."""
        rank, counts = self.communicator.rank, self._counts
        if counts is None:
            return x.chunk(self.communicator.size)[rank]
        start = sum(counts[:rank])
        return x[start : start + counts[rank]]

    def _idle(self, turn: int) -> None:
        """Beside ranks that have something to run."""
        if turn == ROUND:
            shape = self._prepared()
            if shape is None:
                return
            assert self.rounds is not None
            self.rounds.run_idle(shape)
            self._step_is_over = True
        else:
            with self._running(self._tokens_of(turn)):
                self._run_idle[turn - 1]()
        self.num_idle += 1

    def _prepared(self) -> RoundShape | None:
        """The shape that was asked for, on all ranks or on none."""
        assert self.rounds is not None, "rounds are launched on ranks that have none"
        asked = [one for one in self._asked if one.model == ROUND]
        shape = RoundShape(
            max(one.batch_size for one in asked), max(one.num_steps for one in asked)
        )
        may_capture = not any(one.in_flight for one in asked)
        features = [one.features for one in asked]
        return shape if self.rounds.ensure_captured(shape, features, may_capture) else None

    @contextmanager
    def _running(self, counts: list[int] | None) -> Iterator[None]:
        self._runs, self._counts = True, counts
        try:
            yield
        finally:
            self._runs = False

    def _tokens_of(self, model: int) -> list[int]:
        return [one.num_tokens if one.model == model else 0 for one in self._asked]

    def _gather(self, next_run: NextRun) -> int:
        """What runs now: a model's number, ROUND, MEETING where all ranks ask it, or NOTHING."""
        size, width = self.communicator.size, len(next_run)
        shared = [0] * (width * size)
        start = width * self.communicator.rank
        shared[start : start + width] = next_run
        found = self.communicator.greatest(shared)
        self._asked = [NextRun(*found[i : i + width]) for i in range(0, len(found), width)]
        turn = min((one.model for one in self._asked if one.model), default=NOTHING)
        if turn == MEETING and any(one.model != MEETING for one in self._asked):
            return NOTHING
        self._was_busy |= turn > 0
        return turn


def evenly(sharers: ExpertSharers | None) -> AbstractContextManager[None]:
    """Around forwards that all ranks run alike, where there are several."""
    return nullcontext() if sharers is None else sharers.evenly()


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
