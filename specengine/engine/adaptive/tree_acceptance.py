"""How often drafts stand, by their place, in trees of fewer nodes too."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise, repeat
from operator import mul

from specengine.engine.adaptive.acceptance import Acceptance, Shares, conditional

_RESCUED = 0.2  # the chance, before anything is known, that a larger tree goes on where one ends


@dataclass(frozen=True)
class Outcome:
    """Of a request."""

    drafted: int
    level: int
    accepted: int
    ranks: tuple[int, ...] | None


@dataclass(frozen=True)
class Outcomes:
    """Of a round that was to draft, by request."""

    drafted: Sequence[int]  # drafts; of a tree its nodes but the root
    accepted: Sequence[int]  # of them, those that stand
    ranks: Sequence[Sequence[int]] | None = None  # of these, ascending; None: nobody knows
    num_nodes: int | None = None  # that trees were to be cut to, root included
    limits: Sequence[int] | None = None  # levels that requests allow; None: as many as drafts
    of_text: Sequence[bool] | None = None  # as in core.spec.DraftProposal

    @cached_property
    def levels(self) -> Sequence[int]:
        """The deepest place where each might have had a draft."""
        return self.drafted if self.limits is None else [*map(min, self.drafted, self.limits)]

    @property
    def cut_to(self) -> int | None:
        """None for whole trees: they fly too where there is no graph of a smaller one."""
        most = self.num_nodes
        return most if most is not None and max(self.drafted, default=0) < most else None

    @property
    def alike(self) -> dict[Outcome, int]:
        """How many requests had each outcome."""
        ranks = repeat(None) if self.ranks is None else map(tuple, self.ranks)
        counts = Counter(zip(self.drafted, self.levels, self.accepted, ranks, strict=False))
        return {Outcome(*one): count for one, count in counts.items()}


class TreeAcceptance:
    """Acceptance of drafts, and of the best so many of their nodes.

    A smaller tree of the same depth has the nodes of the lowest ranks, and of a path those below
    its size: so each round tells exactly how far every smaller tree would have come. What is
    learned is how far the smallest comes and, of each further size, how often it reaches a place
    that the one before it does not. So a round of few nodes leaves in place what larger ones add,
    and no size is thought to reach less than a smaller one.

    Drafts without ranks are never cut, and count as if all sizes had accepted the same.
    """

    def __init__(self, depth: int, sizes: Sequence[int] = ()) -> None:
        """sizes: of trees beside whole ones, in nodes, root included."""
        self.depth = depth
        self.sizes = sorted(sizes)
        self.least = Acceptance(depth)
        self.rescues = [Shares(depth, _RESCUED) for _ in self.sizes]
        self.is_told = False  # whether ranks were ever given

    @property
    def coverage(self) -> float:
        return self.least.coverage

    def mean_levels(self, num_steps: int, batch_size: int = 1) -> float:
        """Of those that draft, where so many are asked for."""
        return num_steps

    def levels(self, num_steps: int, outcomes: Outcomes) -> list[int]:
        """That each request drafted, in a round of that depth."""
        return [min(level, num_steps) for level in outcomes.levels]

    def observe(self, num_steps: int, outcomes: Outcomes) -> None:
        if not self.sizes:
            self.least.observe(self.levels(num_steps, outcomes), outcomes.accepted)
            return
        self.is_told |= outcomes.ranks is not None
        least: Counter[tuple[int, int]] = Counter()
        pairs: list[Counter[tuple[int, int, int]]] = [Counter() for _ in self.rescues]
        cut_to = outcomes.cut_to
        for one, count in outcomes.alike.items():
            level, kept = min(one.level, num_steps), self._kept(one, cut_to)
            least[level, kept[0]] += count
            for index, (small, large) in enumerate(pairwise(kept)):
                if num_steps == self.depth or self._tells(index + 1, one):
                    pairs[index][level, small, large] += count
        self.least.count(least)
        for index, counts in enumerate(pairs):
            self._compare(index, counts)

    def chances(self, num_nodes: int | None = None) -> list[float]:
        """[depth], in 0..1, that a draft stands, given that those above it do. num_nodes: one of
        the sizes; None is the whole tree."""
        chances, rescues = self.least.chances(), self.rescues[: self._place(num_nodes)]
        if not rescues:
            return chances
        reach = list(accumulate(chances, mul))
        for larger in rescues:
            pairs = zip(reach, larger.chances(), strict=True)
            reach = [old + (1.0 - old) * rescued for old, rescued in pairs]
        return conditional(reach)

    def _place(self, num_nodes: int | None) -> int:
        return len(self.sizes) if num_nodes is None else bisect_left(self.sizes, num_nodes)

    def _compare(self, index: int, counts: Counter[tuple[int, int, int]]) -> None:
        """A size with the next larger one. counts: of requests, by levels drafted, and levels that
        the smaller and the larger tree had accepted."""
        for place in range(self.depth):
            fell = {key: count for key, count in counts.items() if key[0] > place >= key[1]}
            rescued = sum(count for (_, _, large), count in fell.items() if large > place)
            self.rescues[index].add(place, sum(fell.values()), rescued)

    def _kept(self, one: Outcome, num_nodes: int | None) -> list[int]:
        """What each size would have accepted, up to that of the round; from small to large."""
        if one.ranks is None:
            return [one.accepted] * (1 + len(self.sizes))
        smaller = self.sizes[: self._place(num_nodes)]
        return [*(bisect_left(one.ranks, size) for size in smaller), one.accepted]

    def _tells(self, index: int, one: Outcome) -> bool:
        """This size from the one before it: shallow trees may be whole with fewer nodes."""
        least = self.sizes[index] - 1 if index < len(self.sizes) else self.sizes[-1]
        return one.ranks is None or one.drafted >= least
