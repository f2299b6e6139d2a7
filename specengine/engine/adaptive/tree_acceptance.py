"""How often drafts stand, by their place, in trees of fewer nodes too."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, compress, pairwise
from operator import mul

from specengine.engine.adaptive.acceptance import Acceptance, Shares, conditional

_RESCUED = 0.2  # the chance, before anything is known, that a larger tree goes on where one ends


@dataclass(frozen=True)
class Outcomes:
    """Of a round that was to draft, or of a few alike, by request."""

    drafted: Sequence[int]  # drafts; of a tree its nodes but the root
    accepted: Sequence[int]  # of them, those that stand
    ranks: Sequence[Sequence[int]] | None = None  # of these, ascending; None: nobody knows
    num_nodes: int | None = None  # that trees were to be cut to, root included
    limits: Sequence[int] | None = None  # levels that requests allow; None: as many as drafts
    of_text: Sequence[bool] | None = None  # as in core.spec.DraftProposal
    rounds: int = 1

    @cached_property
    def levels(self) -> Sequence[int]:
        """The deepest place where each might have had a draft."""
        drafted, limits = self.drafted, self.limits
        if limits is None or not drafted or drafted == limits:
            return drafted
        if min(drafted) >= max(limits):
            return limits
        return [*map(min, drafted, limits)]


def cut_size(drafted: Sequence[int], num_nodes: int | None) -> int | None:
    """Of the trees of a round that were to be cut to so many nodes; None for whole ones: these fly
    too where there is no graph of smaller ones."""
    if num_nodes is None or max(drafted, default=0) >= num_nodes:
        return None
    return num_nodes


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

    def levels(self, num_steps: int, outcomes: Outcomes) -> Sequence[int]:
        """That each request drafted, in a round of that depth."""
        levels = outcomes.levels
        if max(levels, default=0) <= num_steps:
            return levels
        return [min(level, num_steps) for level in levels]

    def observe(self, num_steps: int, outcomes: Outcomes) -> None:
        if not self.sizes:
            levels = self.levels(num_steps, outcomes)
            self.least.observe(levels, outcomes.accepted, outcomes.rounds)
            return
        self.is_told |= outcomes.ranks is not None
        # Of each size those that the round tells from the one before it, many requests at once:
        # they are few kinds, and the host has this to do between two rounds.
        levels, kept = self.levels(num_steps, outcomes), self._kept(outcomes)
        self.least.count(Counter(zip(levels, kept[0], strict=True)), outcomes.rounds)
        for index, (small, large) in enumerate(pairwise(kept)):
            kinds: Iterable[tuple[int, int, int]] = zip(levels, small, large, strict=True)
            if num_steps != self.depth and outcomes.ranks is not None:
                least = self._least_drafted(index + 1)
                kinds = compress(kinds, [drafted >= least for drafted in outcomes.drafted])
            self._compare(index, Counter(kinds), outcomes.rounds)

    def chances(self, num_nodes: int | None = None) -> list[float]:
        """[depth], in 0..1, that a draft stands, given that those above it do. num_nodes: one of
        the sizes; None is the whole tree."""
        return self.by_size([num_nodes])[num_nodes]

    def by_size(self, sizes: Iterable[int | None]) -> dict[int | None, list[float]]:
        """`chances` of several sizes at once, which takes little longer than of one."""
        found = [self.least.chances()]
        reach = list(accumulate(found[0], mul))
        for larger in self.rescues:
            pairs = zip(reach, larger.chances(), strict=True)
            reach = [old + (1.0 - old) * rescued for old, rescued in pairs]
            found.append(conditional(reach))
        return {size: found[self._place(size)] for size in sizes}

    def _place(self, num_nodes: int | None) -> int:
        return len(self.sizes) if num_nodes is None else bisect_left(self.sizes, num_nodes)

    def _compare(self, index: int, counts: Counter[tuple[int, int, int]], rounds: int) -> None:
        """A size with the next larger one. counts: of requests, by levels drafted, and levels that
        the smaller and the larger tree had accepted."""
        paths = ((small, level, large, n) for (level, small, large), n in counts.items())
        self.rescues[index].add_all(paths, rounds)

    def _kept(self, outcomes: Outcomes) -> list[Sequence[int]]:
        """What each size would have accepted, up to that of the round, by request; from small to
        large."""
        ranks, accepted = outcomes.ranks, outcomes.accepted
        if ranks is None:
            return [accepted] * (1 + len(self.sizes))
        smaller = self.sizes[: self._place(cut_size(outcomes.drafted, outcomes.num_nodes))]
        return [*([bisect_left(one, size) for one in ranks] for size in smaller), accepted]

    def _least_drafted(self, index: int) -> int:
        """Drafts of a tree that tells this size from the one before it: shallow trees may be whole
        with fewer nodes."""
        return self.sizes[index] - 1 if index < len(self.sizes) else self.sizes[-1]
