"""Graphs that are captured while nobody waits for anything."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from time import monotonic, perf_counter

from specengine.core.spec import Drafter, PreparingDrafter
from specengine.engine.graph_round import GraphRound

logger = logging.getLogger(__name__)

Capture = Callable[[], object]

QUIET = 1.0  # seconds without a request before graphs are captured


class QuietTime:
    """How long there has been no request. A capture takes 10 to 45 ms and cannot be interrupted:
    captures begin after a pause, at the start too, so that no request that follows another, or the
    start, within that time waits for one. A longer pause ends in one capture at most, for between
    two of them the queue is looked at."""

    def __init__(self, seconds: float = QUIET, clock: Callable[[], float] = monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self.restart()

    def restart(self) -> None:
        self._end = self._clock() + self._seconds

    @property
    def left(self) -> float:
        """Seconds until captures may begin; 0 from then on."""
        return max(self._end - self._clock(), 0.0)


class IdleCaptures:
    """The first requests of a server would wait for these one by one: forwards in which the drafter
    reads prompts; and rounds in which somebody samples, which a start has one of. Small ones come
    first, as they do with whoever asks first. What requests seldom want (edits, logprobs, grammars)
    is captured when they do."""

    def __init__(self, graph_round: GraphRound, drafter: Drafter) -> None:
        self.graph_round = graph_round
        self.drafter = drafter
        self._left: Iterator[Capture] | None = None
        self._count, self._seconds = 0, 0.0

    def go_on(self) -> bool:
        """Capture one; nothing may be in the air. False: there is nothing left to do."""
        if self._left is None:
            self._left = self._captures()
        if not self.graph_round.runner.graph_memory.has_plenty:
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
        if isinstance(self.drafter, PreparingDrafter):
            yield from self.drafter.captures()
        flying = self.graph_round
        for batch_size in flying.batch_sizes if flying.samples else ():
            for form in flying.forms(batch_size, flying.choices.sampled):
                if form not in flying.captured:
                    yield partial(flying.graph, form, logging.DEBUG)

    def _tell(self) -> None:
        if self._count:
            logger.info("captured %d graphs while idle, %.1f s of it", self._count, self._seconds)
        self._count, self._seconds = 0, 0.0
