"""Simulated rounds for tests of adaptive depth: they cost and accept what a test says."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, pairwise, product
from math import prod
from typing import Any, TypeVar

from specengine.core.spec_stats import DraftShape
from specengine.engine.adaptive.acceptance import Acceptance, HybridAcceptance, RoundObservation
from specengine.engine.adaptive.costs import StepCosts
from specengine.engine.adaptive.state import DepthChooser

T = TypeVar("T")

DEPTH, NODES = 4, 16
SIZES = {1: [2], 2: [4], 4: [5, 8]}  # of cut trees, by depth
BATCH_SIZES = [1, 4, 8, 16, 64, 256]

Path = tuple[int, ...]  # of children, by their rank among siblings
Cost = Callable[[int, DraftShape], float]


def seen(
    num_steps: int, drafted: Sequence[int], accepted: Sequence[int], **more: Any
) -> RoundObservation:
    """One round, of as many requests as there are entries."""
    return RoundObservation(len(drafted), num_steps, drafted, accepted, **more)


def chances(acceptance: Acceptance | HybridAcceptance, num_nodes: int | None = None) -> list[float]:
    return acceptance.by_size([num_nodes])[num_nodes]


def mostly(chosen: Sequence[T]) -> T:
    return Counter(chosen).most_common(1)[0][0]


def changes(run: Callable[[], object], steps: DepthChooser) -> int:
    """How often the kept shape changes in 800 rounds."""
    stood = []
    for _ in range(800):
        run()
        assert steps.current is not None
        stood.append(steps.current.shape)
    return sum(one != other for one, other in pairwise(stood))


def chain_cost(batch_size: int, num_steps: int) -> float:
    """A device that is full at 64 nodes, and a drafter of 5% of a target forward a step."""
    nodes = batch_size * (num_steps + 1)
    return 1.0 + 0.05 * num_steps + max(0.0, nodes - 64) / 64


def measured(cost: Callable[[int, int], float] = chain_cost, depth: int = DEPTH) -> StepCosts:
    sizes = [size for size in BATCH_SIZES if size != 8]
    return StepCosts({size: {k: cost(size, k) for k in range(depth + 1)} for size in sizes})


def rates(
    chances: Sequence[float],
    batch_size: int,
    cost: Callable[[int, int], float] = chain_cost,
) -> list[float]:
    """Tokens a second of each depth, by the definition."""
    path, tokens, found = 1.0, 1.0, [1.0 / cost(batch_size, 0)]
    for depth, chance in enumerate(chances, start=1):
        path *= chance
        tokens += path
        found.append(tokens / cost(batch_size, depth))
    return found


def best_depth(chances: Sequence[float], batch_size: int) -> int:
    found = rates(chances, batch_size)
    return found.index(max(found))


@dataclass
class World:
    """Rounds of chains. chances: acceptance by position. noise: standard deviation of a round's
    time, relative. coverage: share of requests that have a draft in a round. host: seconds of the
    host, by batch size and depth; None where it is not measured."""

    chances: Sequence[float]
    cost: Callable[[int, int], float] = chain_cost
    noise: float = 0.0
    coverage: float = 1.0
    is_timed: bool = True
    host: Callable[[int, int], float] | None = None
    seconds: float = 0.0
    plain_seconds: float = 0.0  # that plain decoding takes for the same tokens
    chosen: list[int] = field(default_factory=list)
    random: random.Random = field(default_factory=lambda: random.Random(0))

    def run(self, steps: DepthChooser, batch_size: int, rounds: int) -> list[int]:
        """The depths that were chosen."""
        for _ in range(rounds):
            self._round(steps, batch_size)
        return self.chosen[-rounds:]

    def _round(self, steps: DepthChooser, batch_size: int) -> None:
        depth = steps.choose(batch_size).num_steps
        drafted = [depth if self.random.random() < self.coverage else 0 for _ in range(batch_size)]
        accepted = [self._accept(levels) for levels in drafted]
        levels = sum(drafted) / batch_size
        low = int(levels)
        share = levels - low
        seconds = (1 - share) * self._cost(batch_size, low)
        seconds += share * self._cost(batch_size, low + 1) if share else 0.0
        seconds *= max(0.1, self.random.gauss(1.0, self.noise))
        steps.observe(seen(depth, drafted, accepted, seconds=seconds if self.is_timed else None))
        if self.host is not None:
            took = self.host(batch_size, depth) * self.random.gauss(1.0, 0.02)
            steps.observe_host(batch_size, DraftShape(depth), took)
        self.chosen.append(depth)
        self.seconds += seconds
        self.plain_seconds += self._cost(batch_size, 0) * (1 + sum(accepted) / batch_size)

    def _cost(self, batch_size: int, depth: int) -> float:
        cost = self.cost(batch_size, depth)
        return cost if self.host is None else max(cost, self.host(batch_size, depth))

    def _accept(self, levels: int) -> int:
        draw, chances = self.random.random, self.chances
        for place in range(levels):
            if draw() >= chances[place]:
                return place
        return levels


def tree_of(chances: Sequence[float], shape: DraftShape) -> list[Path]:
    """Its nodes below the root, best first. chances: of each child to be the accepted one."""
    return _tree_of(tuple(chances), shape)


@cache
def _tree_of(chances: tuple[float, ...], shape: DraftShape) -> list[Path]:
    found = []
    for depth in range(1, shape.num_steps + 1):
        for path in product(range(len(chances)), repeat=depth):
            score = 1.0
            for child in path:
                score *= chances[child]
            found.append((-score, depth, path))
    most = NODES if shape.num_nodes is None else shape.num_nodes
    return [path for _, _, path in sorted(found)][: most - 1]


@cache
def _children(chances: tuple[float, ...]) -> tuple[list[int], list[float]]:
    """Of a node, with -1 for none of them, and their chances added up."""
    weights = [*chances, max(0.0, 1.0 - sum(chances))]
    return [*range(len(chances)), -1], [*accumulate(weights)]


def ranks_of(tree: list[Path], text: Path) -> list[int]:
    """Ranks of the accepted path. text: the children that the target takes; -1 is none of them."""
    ranks = []
    for depth in range(1, len(text) + 1):
        if text[:depth] not in tree:
            break
        ranks.append(1 + tree.index(text[:depth]))
    return ranks


@dataclass
class TreeWorld:
    """Rounds of trees. chances: of each child of a node to be the accepted one."""

    chances: Sequence[float]
    cost: Cost
    noise: float = 0.0
    is_timed: bool = False
    has_ranks: bool = True
    random: random.Random = field(default_factory=lambda: random.Random(0))

    def draw(self) -> Path:
        children, weights = _children(tuple(self.chances))
        return tuple(self.random.choices(children, cum_weights=weights, k=DEPTH))

    def run(self, steps: DepthChooser, batch_size: int, rounds: int) -> list[DraftShape]:
        """The shapes that were chosen."""
        return [self._round(steps, batch_size) for _ in range(rounds)]

    def _round(self, steps: DepthChooser, batch_size: int) -> DraftShape:
        shape = steps.choose(batch_size).shape
        # Without ranks no tree is cut, whatever was chosen.
        tree = tree_of(self.chances, shape if self.has_ranks else DraftShape(shape.num_steps))
        ranks = [ranks_of(tree, self.draw()) for _ in range(batch_size)]
        seconds = self.cost(batch_size, shape) * max(0.1, self.random.gauss(1.0, self.noise))
        observation = RoundObservation(
            batch_size,
            shape.num_steps,
            [len(tree)] * batch_size,
            [len(one) for one in ranks],
            shape.num_nodes,
            ranks if self.has_ranks and shape.num_steps else None,
            seconds=seconds if self.is_timed else None,
        )
        steps.observe(observation)
        return shape

    def tokens(self, shape: DraftShape) -> float:
        """Mean tokens of a request and round, over such rounds alone: a node is accepted as often
        as the target takes its path."""
        tree = tree_of(self.chances, shape)
        assert all(len(path) == 1 or path[:-1] in tree for path in tree)
        return 1 + sum(prod(self.chances[child] for child in path) for path in tree)

    def rate(self, shape: DraftShape, batch_size: int) -> float:
        return batch_size * self.tokens(shape) / self.cost(batch_size, shape)


def tree_cost(batch_size: int, shape: DraftShape) -> float:
    """As chain_cost, of trees."""
    whole = {0: 1, 1: 4, 2: 13}.get(shape.num_steps, NODES)
    nodes = batch_size * (whole if shape.num_nodes is None else shape.num_nodes)
    return 1.0 + 0.05 * shape.num_steps + max(0, nodes - 64) / 64


def measured_trees(cost: Cost = tree_cost) -> StepCosts:
    """Smaller trees at batch sizes of 4 and more."""
    sizes = BATCH_SIZES[:-1]
    whole = {b: {k: cost(b, DraftShape(k)) for k in range(DEPTH + 1)} for b in sizes}
    smaller: dict[int, dict[int, dict[int, float]]] = {}
    for depth, found in SIZES.items():
        for nodes in found:
            for b in sizes[1:]:
                curve = smaller.setdefault(nodes, {}).setdefault(b, {})
                curve[depth] = cost(b, DraftShape(depth, nodes))
    return StepCosts(whole, smaller)
