"""Graphs that are captured while there is no work."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from time import monotonic, perf_counter

from specengine.core.drafter import Drafter
from specengine.core.interruption import CaptureInterrupted, interruptible
from specengine.engine.round.executor import RoundExecutor

logger = logging.getLogger(__name__)

Capture = Callable[[], object]

QUIET = 1.0  # seconds without a request before graphs are captured


class QuietTime:
    """How long there has been no request. Captures begin after a pause, at the start too: a request
    that comes amid one waits until the host reaches the capture's next interruption point."""

    def __init__(self, seconds: float = QUIET, clock: Callable[[], float] = monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self.restart()

    def restart(self) -> None:
        self._end = self._clock() + self._seconds

    @property
    def left(self) -> float:
        """Seconds until captures may begin; 0 from then on."""
        return max(self._end - self._clock(), 0.0)


class BackgroundCapture:
    """Captures graphs, one at a time, that the first requests of a server would otherwise wait for:
    those in which the drafter reads prompts, those of long prompts, and those of rounds with
    requests that sample, small rounds first. Rounds of rare features (edits, logprobs, grammars)
    are captured when a request first needs them. The first graph of a long prompt also loads
    FlashAttention's kernels, so that no prompt has to."""

    def __init__(self, rounds: RoundExecutor, drafter: Drafter) -> None:
        self.rounds = rounds
        self.drafter = drafter
        self._left: Iterator[Capture] | None = None
        self._interrupted: Capture | None = None
        self._count, self._seconds = 0, 0.0

    def advance(self, is_wanted: Callable[[], bool]) -> bool:
        """Capture one graph; no round may be in flight. False: there is nothing left to do.
        is_wanted: whether work has come; the capture is then given up, and made again later."""
        capture = self._next()
        if capture is None:
            self._log()
            return False
        start = perf_counter()
        try:
            with interruptible(is_wanted):
                capture()
        except CaptureInterrupted:
            self._interrupted = capture
            return True
        except Exception as error:  # Triton's are of many kinds
            if self.rounds.runner.graph_memory.communicator.size > 1:
                raise  # the other ranks have this graph, and wait in its collectives
            # Not tried again: a batch that needs such a graph counts a fallback.
            logger.warning("no more graphs are captured while idle: %s", error, exc_info=True)
            self._left = iter(())
        self._count, self._seconds = self._count + 1, self._seconds + perf_counter() - start
        return True

    def _next(self) -> Capture | None:
        if self._left is None:
            self._left = self._captures()
        if not self.rounds.runner.graph_memory.has_plenty:
            self._left, self._interrupted = iter(()), None
        capture, self._interrupted = self._interrupted, None
        return next(self._left, None) if capture is None else capture

    def _captures(self) -> Iterator[Capture]:
        yield from self.drafter.captures()
        rounds = self.rounds
        yield from rounds.runner.captures()
        for batch_size in rounds.batch_sizes:
            for key in rounds.keys(batch_size, rounds.sampling.sampled):
                for one in (key, *rounds.lanes.keys_of(key)):
                    if one not in rounds.captured:
                        yield partial(rounds.graph, one, logging.DEBUG)

    def _log(self) -> None:
        if self._count:
            logger.info("captured %d graphs while idle, %.1f s of it", self._count, self._seconds)
        self._count, self._seconds = 0, 0.0
