"""How a round runs: in CUDA graphs, or operator by operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from specengine.core.request import Req
from specengine.engine.round.key import RoundEvent, RoundKey
from specengine.engine.round.round import BoundRound
from specengine.runner.graph_cache import Graph, GraphCache

Part = Callable[[], object]
RoundCache = GraphCache[RoundKey, None]  # rounds keep their buffers themselves


class LaunchMode(Protocol):
    """How a round runs."""

    def prepare(self, parts: Sequence[Part], cache: RoundCache) -> Sequence[Graph]:
        """parts: run in order. What one leaves for the next stays where it is."""
        ...

    def new_event(self) -> RoundEvent: ...


class InGraphs:
    """In CUDA graphs."""

    def prepare(self, parts: Sequence[Part], cache: RoundCache) -> Sequence[Graph]:
        return cache.record_parts(parts)

    def new_event(self) -> RoundEvent:
        return torch.cuda.Event()  # type: ignore[no-untyped-call]


class Eager:
    """Operator by operator, on any device, and awaited at once."""

    def prepare(self, parts: Sequence[Part], cache: RoundCache) -> Sequence[Graph]:
        for part in parts:  # once, as before a capture
            part()
        return [_Uncaptured(part) for part in parts]

    def new_event(self) -> RoundEvent:
        return _Done()


class _Uncaptured:
    def __init__(self, run: Part) -> None:
        self.replay = run


class _Done:
    """An event that has passed."""

    def record(self) -> None: ...

    def synchronize(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def query(self) -> bool:
        return True


class GrammarRound:
    """A round in which grammars constrain some requests: a graph a step, and before the last of
    them the token masks. What the steps leave for each other lies in the graphs' pool: between
    `replay` and `finish` no other graph may run."""

    def __init__(self, bound: BoundRound, graphs: Sequence[Graph], event: RoundEvent) -> None:
        self.bound = bound
        self._draft, self._verify, self._accept = graphs
        self._copy = torch.zeros(bound.host_copy().shape, dtype=torch.int64)
        if bound.key.num_steps and bound.rows_B.is_cuda:
            self._copy = self._copy.pin_memory()
        self._copied = event

    def replay(self) -> None:
        """Launch what needs no masks."""
        self._draft.replay()
        if self.bound.key.num_steps:
            self._copy.copy_(self.bound.host_copy(), non_blocking=True)
            self._copied.record()
        self._verify.replay()

    def finish(self, reqs: list[Req]) -> dict[int, list[int]]:
        """Make the masks while the device verifies, and launch the rest. The requests' grammars
        stand after the tokens that the round starts from. Returns KeptDepths."""
        if self.bound.key.num_steps:
            self._copied.synchronize()
        depths = self.bound.send_masks(reqs, self._copy)
        self._accept.replay()
        return depths
