"""Start-up phases, each logged with its time, so that the terminal is never silent for long."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

logger = logging.getLogger("specengine.startup")


class Phases:
    """Times of the phases of one start-up, in seconds, in order."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        logger.info("%s ...", name)
        start = perf_counter()
        yield
        took = perf_counter() - start
        self.seconds[name] = self.seconds.get(name, 0.0) + took
        logger.info("%s: %.1f s", name, took)

    @property
    def total(self) -> float:
        return sum(self.seconds.values())
