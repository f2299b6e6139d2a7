"""Graphs that are captured while nobody waits for anything."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter

from specengine.core.drafter import Drafter
from specengine.engine.round.executor import RoundExecutor

logger = logging.getLogger(__name__)

Capture = Callable[[], object]


class IdleCaptures:
    """The first requests of a server would wait for these one by one: forwards in which the drafter
    reads prompts; and rounds in which somebody samples, which a start has one of. Small ones come
    first, as they do with whoever asks first. What requests seldom want (edits, logprobs, grammars)
    is captured when they do."""

    def __init__(self, rounds: RoundExecutor, drafter: Drafter) -> None:
        self.rounds = rounds
        self.drafter = drafter
        self._left: Iterator[Capture] | None = None
        self._count, self._seconds = 0, 0.0

    def go_on(self) -> bool:
        """Capture one; nothing may be in the air. False: there is nothing left to do."""
        if self._left is None:
            self._left = self._captures()
        if not self.rounds.runner.graph_memory.has_plenty:
            self._left = iter(())
        capture = next(self._left, None)
        if capture is None:
            self._tell()
            return False
        start = perf_counter()
        try:
            capture()
        except Exception as error:  # Triton's are of many kinds
            # Not tried again: who needs one of these, and has no other, is told why.
            logger.warning("no more graphs are captured while idle: %s", error, exc_info=True)
            self._left = iter(())
        self._count, self._seconds = self._count + 1, self._seconds + perf_counter() - start
        return True

    def _captures(self) -> Iterator[Capture]:
        yield from self.drafter.captures()
        rounds = self.rounds
        for batch_size in rounds.batch_sizes:
            for key in rounds.keys(batch_size, rounds.sampling.sampled):
                if key not in rounds.captured:
                    yield partial(rounds.graph, key, logging.DEBUG)

    def _tell(self) -> None:
        if self._count:
            logger.info("captured %d graphs while idle, %.1f s of it", self._count, self._seconds)
        self._count, self._seconds = 0, 0.0
