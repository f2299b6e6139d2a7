"""One cache of captured CUDA graphs, for every kind of graph: decode, prefill, ragged forwards,
draft loops, rounds."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Generic, TypeVar

from specengine.core.platform import Graph
from specengine.runner.capture import capture, capture_parts, without_garbage_collection
from specengine.runner.fallbacks import count_fallback
from specengine.runner.graph_guard import GraphGuard
from specengine.runner.memory.graph_memory import GraphMemory

logger = logging.getLogger(__name__)

Key = TypeVar("Key", bound=Hashable)
Buffers = TypeVar("Buffers")
Size = TypeVar("Size")
T = TypeVar("T")


@dataclass(frozen=True)
class Captured(Generic[Buffers]):
    """A graph, and the tensors that it reads and writes: they must live as long as the graph."""

    graph: Graph
    buffers: Buffers
    guard: GraphGuard | None  # set with --debug-cuda-graph


class GraphCache(Generic[Key, Buffers]):
    """The captured graphs of one kind, by key.

    The key, a frozen dataclass or NamedTuple, says which batches share a graph. The owner of the
    cache pads a batch to a key, builds the fixed buffers and fills them; the cache captures within
    the memory budget, checks inputs before a replay, counts and logs. `make` functions build the
    buffers of a key and record its graph with `record`:

        def make(key: ForwardKey) -> tuple[Graph, ForwardBuffers]:
            inputs = ...  # fixed tensors
            graph, output = cache.record(lambda: forward(inputs))
            return graph, ForwardBuffers(inputs, output)

        cache.capture_at_start(sizes, keys_of, make)  # largest first, as far as memory reaches

        if not cache.has_memory_for(key):             # then in every step:
            cache.count_fallback(MEMORY_SPENT)
            return None                               # run eagerly
        captured = cache.get(key, make)               # captures at the first use
        captured.buffers.fill(batch)
        cache.replay(captured)

    Graphs of an engine share one memory pool: what a replay writes must be read or copied before
    any other graph of the engine runs.
    """

    unguarded = ("captured",)  # runner/graph_guard.py

    def __init__(
        self,
        kind: str,
        memory: GraphMemory,
        guard_of: Callable[[Buffers], GraphGuard | None] = lambda _: None,
        counters: Counter[str] | None = None,
    ) -> None:
        """kind: the name in /metrics and the log. memory: the engine's, shared by all caches.
        guard_of: called after a capture; the guard over the inputs of the new graph, which may be
        one for all graphs, or None where inputs are not checked. counters: of another cache of this
        kind, to count together."""
        self.kind = kind
        self.memory = memory
        self.guard_of = guard_of
        self.counters = Counter[str]() if counters is None else counters
        self.captured: dict[Key, Captured[Buffers]] = {}

    def has_memory_for(self, *keys: Key) -> bool:
        """Whether each of these graphs exists or may still be captured."""
        return not self.memory.is_spent or all(key in self.captured for key in keys)

    def count_fallback(self, reason: str) -> None:
        """Count a batch that none of the graphs served: a reason of runner/fallbacks.py."""
        count_fallback(self.counters, self.kind, reason)

    def get(
        self,
        key: Key,
        make: Callable[[Key], tuple[Graph, Buffers]],
        level: int = logging.INFO,
    ) -> Captured[Buffers]:
        """The graph of a key, captured now if this is its first use. level: of the log line."""
        found = self.captured.get(key)
        if found is None:
            start = perf_counter()
            with without_garbage_collection():
                found = self._capture(key, make)
            seconds = perf_counter() - start
            logger.log(level, "captured a %s graph in %.2f s: %s", self.kind, seconds, key)
        return found

    def capture_at_start(
        self,
        sizes: Sequence[Size],
        keys_of: Callable[[Size], Sequence[Key]],
        make: Callable[[Key], tuple[Graph, Buffers]],
    ) -> list[Size]:
        """Capture the keys of every size in the given order, as far as the budget reaches; gives
        the sizes that were captured. sizes: from large to small, since larger graphs serve the
        batches of those that are left out."""
        start, used_before = perf_counter(), self.memory.used
        done: list[Size] = []
        with without_garbage_collection():
            for size in self.memory.affordable(sizes, f"{self.kind} graphs"):
                for key in keys_of(size):
                    self._capture(key, make)
                done.append(size)
        logger.info(
            "captured %d %s graphs (%s) in %.1f s, %.2f GiB",
            len(self.captured),
            self.kind,
            ", ".join(map(str, done)),
            perf_counter() - start,
            (self.memory.used - used_before) / (1 << 30),
        )
        return done

    def record(self, run: Callable[[], T]) -> tuple[Graph, T]:
        """Capture `run` into the shared memory pool; for `make`. Gives the graph and what `run`
        returned, which every replay writes. What the capture takes counts as used; buffers that
        `make` allocates count only where the caller measures (GraphMemory.measured)."""
        with self.memory.measured():
            return capture(run, self.memory.pool, self.memory.platform)

    def record_parts(self, parts: Sequence[Callable[[], object]]) -> Sequence[Graph]:
        """The same for several functions that are replayed one by one: a graph a part."""
        with self.memory.measured():
            return capture_parts(parts, self.memory.pool, self.memory.platform)

    def replay(self, captured: Captured[Buffers]) -> None:
        """Launch a graph whose buffers are filled. Raises GraphInputError where the guard finds an
        input that has moved."""
        if captured.guard is not None:
            captured.guard.check()
        captured.graph.replay()
        self.counters["replays"] += 1

    def _capture(self, key: Key, make: Callable[[Key], tuple[Graph, Buffers]]) -> Captured[Buffers]:
        graph, buffers = make(key)
        found = self.captured[key] = Captured(graph, buffers, self.guard_of(buffers))
        self.counters["captures"] += 1
        return found
