"""Graphs that are captured while nobody waits for anything."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from time import perf_counter

from specengine.engine.graph_round import GraphRound
from specengine.engine.round_form import Form

logger = logging.getLogger(__name__)


class IdleCaptures:
    """Of rounds in which somebody samples, which a start has one of: the first requests of a server
    would wait for the others one by one. Small batches come first, as they do with whoever asks
    first. What requests seldom want (edits, logprobs, grammars) is captured when they do."""

    def __init__(self, graph_round: GraphRound) -> None:
        self.graph_round = graph_round
        self._left: Iterator[Form] | None = None
        self._count, self._seconds = 0, 0.0

    def go_on(self) -> bool:
        """Capture one; nothing may be in the air. False: there is nothing left to do."""
        if self._left is None:
            self._left = self._forms()
        if self.graph_round.runner.graph_memory.is_spent:
            self._left = iter(())
        form = next((one for one in self._left if one not in self.graph_round.captured), None)
        if form is None:
            self._tell()
            return False
        start = perf_counter()
        try:
            self.graph_round.graph(form, logging.DEBUG)
        except RuntimeError as error:
            # Not tried again: who needs one of these, and has no other, is told why.
            logger.warning("no more graphs are captured while idle: %s", error)
            self._left = iter(())
        self._count, self._seconds = self._count + 1, self._seconds + perf_counter() - start
        return True

    def _forms(self) -> Iterator[Form]:
        flying = self.graph_round
        if flying.samples:
            for batch_size in flying.batch_sizes:
                yield from flying.forms(batch_size, flying.choices.sampled)

    def _tell(self) -> None:
        if self._count:
            given = self._count, self._seconds
            logger.info("captured %d round graphs that sample while idle, %.1f s of it", *given)
        self._count, self._seconds = 0, 0.0
