"""How a round runs: in CUDA graphs, or operator by operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from specengine.core.platform import Graph, Platform, best_device, platform_of
from specengine.engine.round.key import RoundEvent, RoundKey
from specengine.runner.graph_cache import GraphCache

Part = Callable[[], object]
RoundCache = GraphCache[RoundKey, None]  # rounds keep their buffers themselves


class LaunchMode(Protocol):
    """How a round runs."""

    def prepare(self, parts: Sequence[Part], cache: RoundCache) -> Sequence[Graph]:
        """parts: run in order. What one leaves for the next stays where it is."""
        ...

    def new_event(self) -> RoundEvent: ...


class InGraphs:
    """In graphs of the platform."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform

    def prepare(self, parts: Sequence[Part], cache: RoundCache) -> Sequence[Graph]:
        return cache.record_parts(parts)

    def new_event(self) -> RoundEvent:
        return self._platform.new_event()


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
        platform_of(best_device()).synchronize()

    def query(self) -> bool:
        return True
