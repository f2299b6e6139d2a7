"""Points of load, and the share of each that a client process takes."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from dataclasses import dataclass

from specengine.lab.serving.records import Ask

STREAMS_OF_A_CLIENT = 64  # at once, before there is another process
RATE_OF_A_CLIENT = 100.0  # requests a second


@dataclass(frozen=True)
class Load:
    """concurrency: requests at once, most; with a rate, None is no bound. rate: requests a second
    in the mean, sent at the times of a Poisson process; None for a closed loop."""

    concurrency: int | None
    rate: float | None = None

    @property
    def name(self) -> str:
        if self.rate is None:
            return f"{self.concurrency} at once"
        bound = "" if self.concurrency is None else f", at most {self.concurrency} at once"
        return f"{self.rate:g} a second{bound}"

    @property
    def default_requests(self) -> int:
        """Four waves, or half a minute."""
        if self.rate is None:
            assert self.concurrency is not None
            return max(4 * self.concurrency, 8)
        return max(32, math.ceil(30 * min(self.rate, 32.0)))

    @property
    def default_warmup(self) -> int:
        """A full batch: graphs of this size and its costs are then known."""
        return self.concurrency if self.concurrency is not None else 8

    def num_clients(self, asked: int | None, num_requests: int) -> int:
        """Processes, never more than requests at once."""
        most = num_requests if self.concurrency is None else min(self.concurrency, num_requests)
        if asked is None:
            streams = 0 if self.rate is not None else most / STREAMS_OF_A_CLIENT
            rate = 0.0 if self.rate is None else min(self.rate, 1e6) / RATE_OF_A_CLIENT
            asked = min(math.ceil(max(streams, rate, 1)), max(1, (os.cpu_count() or 1) // 2))
        return max(1, min(asked, most))

    def asks(self, make: Callable[[], bytes], count: int, seed: int) -> list[Ask]:
        """In the order in which they are sent."""
        rng, due = random.Random(seed), 0.0
        asks = []
        for number in range(count):
            asks.append(Ask(number, make(), due))
            if self.rate is not None and math.isfinite(self.rate):
                due += rng.expovariate(self.rate)
        return asks

    def share(self, number: int, num_clients: int, num_requests: int) -> int:
        """Requests at once of one client."""
        whole = self.concurrency or num_requests
        return whole // num_clients + (number < whole % num_clients)


def deal(asks: list[Ask], shares: list[int]) -> list[list[Ask]]:
    """To each client in proportion to its share, in turns."""
    hands: list[list[Ask]] = [[] for _ in shares]
    for ask in asks:
        place = min(range(len(shares)), key=lambda one: (len(hands[one]) + 1) / shares[one])
        hands[place].append(ask)
    return hands
