"""Which drafts are worth their cost: how deep, and of trees how many nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from specengine.engine.adaptive.cost_table import Costs


class Shape(NamedTuple):
    """What the drafts of a round may be. num_nodes: of trees, root included, where it is fewer than
    such a depth has; their best ones."""

    num_steps: int
    num_nodes: int | None = None

    def __str__(self) -> str:
        nodes = "" if self.num_nodes is None else f" with {self.num_nodes} nodes"
        return f"K={self.num_steps}{nodes}"


PLAIN = Shape(0)


@dataclass(frozen=True)
class Decision:
    """expected_gain: tokens a second over those of plain decoding; None while costs are unknown.
    num_nodes: as in Shape."""

    num_steps: int
    reason: str
    expected_gain: float | None
    num_nodes: int | None = None

    @cached_property
    def shape(self) -> Shape:
        return Shape(self.num_steps, self.num_nodes)


@dataclass(frozen=True)
class Outlook:
    """What each shape promises a batch, in rounds in which anybody has a draft: the others are the
    same whatever is chosen."""

    batch_size: int
    chances: Mapping[int | None, Sequence[float]]  # by num_nodes
    tokens: dict[Shape, float]  # a request and round
    seconds: dict[Shape, float]  # a round
    rates: dict[Shape, float]  # tokens a second

    def gain(self, shape: Shape) -> float:
        return self.rates[shape] / self.rates[PLAIN]

    @property
    def best(self) -> Shape:
        """The first of equals: shallow ones come before deep ones, small ones before large ones."""
        return max(self.rates, key=self.rates.__getitem__)

    def decide(self, shape: Shape) -> Decision:
        gain = self.gain(shape)
        shown = shape if shape.num_steps else self._best_draft
        chances = " ".join(f"{chance:.2f}" for chance in self.chances[shown.num_nodes])
        reason = (
            f"batch {self.batch_size}: {shape}, {gain:.2f}x of none; acceptance {chances}"
            if shape.num_steps
            else f"batch {self.batch_size}: K=0, the best draft {shown} would be "
            f"{self.gain(shown):.2f}x of none; acceptance {chances}"
        )
        return Decision(shape.num_steps, reason, gain, shape.num_nodes)

    @property
    def _best_draft(self) -> Shape:
        drafts = (shape for shape in self.rates if shape.num_steps)
        return max(drafts, key=self.rates.__getitem__)


def expected_tokens(chances: Sequence[float]) -> list[float]:
    """Of chains of 0, 1, .. len(chances) drafts, the bonus token included."""
    tokens, path = [1.0], 1.0
    for chance in chances:
        path *= chance
        tokens.append(tokens[-1] + path)
    return tokens


def outlook(
    batch_size: int,
    chances: Mapping[int | None, Sequence[float]],
    coverage: float,
    seconds: dict[Shape, float],
) -> Outlook:
    """chances: acceptance by place, for each num_nodes there is. coverage: share of requests that
    draft. seconds: of a round of each shape, ascending, PLAIN among them."""
    expected = {size: expected_tokens(places) for size, places in chances.items()}
    tokens = {
        shape: 1.0 + coverage * (expected[shape.num_nodes][shape.num_steps] - 1.0)
        for shape in seconds
    }
    rates = {shape: batch_size * tokens[shape] / cost for shape, cost in seconds.items()}
    return Outlook(batch_size, chances, tokens, seconds, rates)


def seconds_of(
    costs: Costs, batch_size: int, levels: Mapping[int, float], shapes: Sequence[Shape]
) -> dict[Shape, float] | None:
    """Of a round of each shape; None where those of whole drafts are not known. A smaller tree of
    which nothing is known costs what the whole one does while costs are learned, and else is
    left out. levels: that a request drafts, the mean of them by num_steps."""
    found: dict[Shape, float] = {}
    for shape in shapes:
        depth = levels[shape.num_steps]
        seconds = costs.of(batch_size, depth, shape.num_nodes)
        if seconds is None and shape.num_nodes is not None:
            if costs.is_fixed:
                continue
            seconds = costs.of(batch_size, depth)
        if seconds is None:
            return None
        found[shape] = seconds
    return found


def all_shapes(steps: Sequence[int], sizes: Mapping[int, Sequence[int]]) -> list[Shape]:
    """Ascending. sizes: num_nodes by num_steps, beside whole drafts."""
    return [
        Shape(depth, size)
        for depth in sorted(steps)
        for size in (*sorted(sizes.get(depth, ())), None)
    ]


def smaller_sizes(steps: Sequence[int], nodes_of: Callable[[int], int]) -> dict[int, list[int]]:
    """Sizes of trees to choose from beside whole ones: a half and a quarter of the deepest, and a
    quarter of each other, but enough for a path that goes all the way down. nodes_of(depth): of a
    whole tree, root included.

    Few, for on a GPU each is a graph, and each is tried now and then.
    """
    deepest, sizes = max(steps), {}
    for depth in filter(None, steps):
        whole = nodes_of(depth)
        parts = (2, 4) if depth == deepest else (4,)
        found = {max(-(-whole // part), depth + 1) for part in parts}
        sizes[depth] = sorted(size for size in found if size < whole)
    return {depth: found for depth, found in sizes.items() if found}
