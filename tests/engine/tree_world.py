"""Rounds of trees that cost and accept what a test says, without an engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product

from specengine.engine.adaptive.costs import DraftShape, StepCosts
from specengine.engine.adaptive.state import AdaptiveSteps

DEPTH, NODES = 4, 16
SIZES = {1: [2], 2: [4], 4: [5, 8]}
Path = tuple[int, ...]  # of children, by their rank among siblings


def tree_of(chances: Sequence[float], shape: DraftShape) -> list[Path]:
    """Its nodes below the root, best first. chances: of each child to be the one that stands."""
    found = []
    for depth in range(1, shape.num_steps + 1):
        for path in product(range(len(chances)), repeat=depth):
            score = 1.0
            for child in path:
                score *= chances[child]
            found.append((-score, depth, path))
    most = NODES if shape.num_nodes is None else shape.num_nodes
    return [path for _, _, path in sorted(found)][: most - 1]


def ranks_of(tree: list[Path], text: Path) -> list[int]:
    """Of the accepted path. text: the children that the target takes; -1 is none of them."""
    stands = []
    for depth in range(1, len(text) + 1):
        if text[:depth] not in tree:
            break
        stands.append(1 + tree.index(text[:depth]))
    return stands


@dataclass
class TreeWorld:
    chances: Sequence[float]
    cost: Callable[[int, DraftShape], float]
    noise: float = 0.0
    is_timed: bool = False
    tells_ranks: bool = True
    seed: int = 0
    chosen: list[DraftShape] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def draw(self) -> Path:
        weights = [*self.chances, max(0.0, 1.0 - sum(self.chances))]
        children = [*range(len(self.chances)), -1]
        return tuple(self.random.choices(children, weights, k=DEPTH))

    def run(self, steps: AdaptiveSteps, batch_size: int, rounds: int) -> list[DraftShape]:
        """What was chosen."""
        start = len(self.chosen)
        for _ in range(rounds):
            shape = steps.choose(batch_size).shape
            self.observe(steps, batch_size, shape)
            self.chosen.append(shape)
        return self.chosen[start:]

    def observe(self, steps: AdaptiveSteps, batch_size: int, shape: DraftShape) -> None:
        # Without ranks nothing is cut, whatever was chosen.
        tree = tree_of(self.chances, shape if self.tells_ranks else DraftShape(shape.num_steps))
        ranks = [ranks_of(tree, self.draw()) for _ in range(batch_size)]
        accepted = [len(one) for one in ranks]
        seconds = self.cost(batch_size, shape) * max(0.1, self.random.gauss(1.0, self.noise))
        steps.observe(
            batch_size,
            shape.num_steps,
            [len(tree)] * batch_size,
            accepted,
            seconds if self.is_timed else None,
            shape.num_nodes,
            ranks if self.tells_ranks and shape.num_steps else None,
        )

    def tokens(self, shape: DraftShape, draws: int = 4000) -> float:
        """A request and round, by running such rounds alone."""
        tree = tree_of(self.chances, shape)
        return 1 + sum(len(ranks_of(tree, self.draw())) for _ in range(draws)) / draws

    def rate(self, shape: DraftShape, batch_size: int) -> float:
        return batch_size * self.tokens(shape) / self.cost(batch_size, shape)


def nodes_of(shape: DraftShape) -> int:
    whole = {0: 1, 1: 4, 2: 13}.get(shape.num_steps, NODES)
    return whole if shape.num_nodes is None else shape.num_nodes


def round_cost(batch_size: int, shape: DraftShape) -> float:
    """A card that is full at 64 nodes, and a drafter of 5% of a forward a step."""
    nodes = batch_size * nodes_of(shape)
    return 1.0 + 0.05 * shape.num_steps + max(0, nodes - 64) / 64


def measured(cost: Callable[[int, DraftShape], float] = round_cost) -> StepCosts:
    """Smaller trees at batch sizes of 4 and more."""
    sizes = [1, 4, 8, 16, 64]
    whole = {b: {k: cost(b, DraftShape(k)) for k in range(DEPTH + 1)} for b in sizes}
    smaller: dict[int, dict[int, dict[int, float]]] = {}
    for depth, found in SIZES.items():
        for nodes in found:
            for b in sizes[1:]:
                curve = smaller.setdefault(nodes, {}).setdefault(b, {})
                curve[depth] = cost(b, DraftShape(depth, nodes))
    return StepCosts(whole, smaller)
