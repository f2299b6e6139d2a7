"""Rounds that cost and accept what a test says, without an engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specengine.engine.adaptive.costs import StepCosts, measure
from specengine.engine.adaptive.state import AdaptiveSteps

DEPTH = 4


def round_cost(batch_size: int, num_steps: int) -> float:
    """A card that is full at about 64 nodes, and a drafter of 5% of a forward a step."""
    nodes = batch_size * (num_steps + 1)
    return 1.0 + 0.05 * num_steps + max(0.0, nodes - 64) / 64


@dataclass
class World:
    """chances: acceptance by place. noise: standard deviation of a round's time, relative."""

    chances: Sequence[float]
    cost: Callable[[int, int], float] = round_cost
    noise: float = 0.0
    coverage: float = 1.0  # share of requests that find a draft in a round
    is_timed: bool = True
    seed: int = 0
    seconds: float = 0.0
    plain_seconds: float = 0.0  # that plain decoding takes for the same tokens
    chosen: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def run(self, steps: AdaptiveSteps, batch_size: int, rounds: int) -> list[int]:
        """What was chosen."""
        start = len(self.chosen)
        for _ in range(rounds):
            self._round(steps, batch_size)
        return self.chosen[start:]

    def _round(self, steps: AdaptiveSteps, batch_size: int) -> None:
        depth = steps.choose(batch_size).num_steps
        drafted = [depth if self.random.random() < self.coverage else 0 for _ in range(batch_size)]
        accepted = [self._accept(levels) for levels in drafted]
        levels = sum(drafted) / batch_size
        low = int(levels)
        share = levels - low
        seconds = (1 - share) * self.cost(batch_size, low)
        seconds += share * self.cost(batch_size, low + 1) if share else 0.0
        seconds *= max(0.1, self.random.gauss(1.0, self.noise))
        steps.observe(batch_size, depth, drafted, accepted, seconds if self.is_timed else None)
        self.chosen.append(depth)
        self.seconds += seconds
        self.plain_seconds += self.cost(batch_size, 0) * (1 + sum(accepted) / batch_size)

    def _accept(self, levels: int) -> int:
        for place in range(levels):
            if self.random.random() >= self.chances[place]:
                return place
        return levels


def measured(cost: Callable[[int, int], float] = round_cost, depth: int = DEPTH) -> StepCosts:
    return measure(cost, [1, 4, 16, 64, 256], range(depth + 1))


def best_depth(
    chances: Sequence[float], batch_size: int, cost: Callable[[int, int], float] = round_cost
) -> int:
    rates, path, tokens = {}, 1.0, 0.0
    for depth in range(len(chances) + 1):
        tokens += path
        rates[depth] = tokens / cost(batch_size, depth)
        path *= chances[depth] if depth < len(chances) else 0.0
    return max(rates, key=lambda depth: rates[depth])


def rate(
    chances: Sequence[float],
    batch_size: int,
    depth: int,
    cost: Callable[[int, int], float] = round_cost,
) -> float:
    path, tokens = 1.0, 1.0
    for chance in chances[:depth]:
        path *= chance
        tokens += path
    return tokens / cost(batch_size, depth)
