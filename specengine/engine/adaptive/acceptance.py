"""The chance that a draft is accepted, by its position, learned from past rounds."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, compress, pairwise
from operator import and_, mul, not_
from typing import Any

_PRIOR = 0.7  # chance of the first position; a later one is expected to equal the one before it
_PRIOR_RESCUE = 0.2  # chance that a larger tree continues a path where a smaller one ends
_PRIOR_LOOKUP = 0.5  # share of requests with drafts from lookup
_PRIOR_COUNT = 4.0
_MEMORY = 200  # drafts
_LEAST_KEPT = 1.0 - 1.0 / 16  # of what is known, after a round of many drafts


@dataclass(frozen=True)
class RoundObservation:
    """The outcome of one round, or of `num_rounds` alike rounds taken together.

    Sequences have one entry a request. They may be kept for a few rounds: do not change them.

    num_steps, num_nodes: as chosen; num_nodes is None for chains and whole trees. num_drafted:
    drafts; of a tree its nodes without the root. num_accepted: those on the accepted path.
    path_ranks: their ranks, ascending (VerifyResult.path_ranks). limits: the most levels that each
    request allows, if they do not follow from num_drafted. from_lookup: whether the drafts came
    from lookup. seconds: of the whole round; None leaves the costs unchanged. drafting_seconds: the
    part of these that the host spent on drafting.
    """

    batch_size: int
    num_steps: int
    num_drafted: Sequence[int]
    num_accepted: Sequence[int]
    num_nodes: int | None = None
    path_ranks: Sequence[Sequence[int]] | None = None
    limits: Sequence[int] | None = None
    from_lookup: Sequence[bool] | None = None
    seconds: float | None = None
    drafting_seconds: float = 0.0
    num_rounds: int = 1

    @cached_property
    def levels(self) -> Sequence[int]:
        """The deepest position at which each request may have had a draft."""
        drafted, limits = self.num_drafted, self.limits
        if limits is None or not drafted or drafted == limits:
            return drafted
        if min(drafted) >= max(limits):
            return limits
        return [*map(min, drafted, limits)]

    @property
    def cut_size(self) -> int | None:
        """Nodes that its trees were cut to, root included; None for whole trees, which also run
        where no graph has the smaller size."""
        if self.num_nodes is None or max(self.num_drafted, default=0) >= self.num_nodes:
            return None
        return self.num_nodes

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for rounds that may be learned from together."""
        return self.num_steps, self.num_nodes, self.path_ranks is None, self.cut_size

    def of_requests(self, kept: Sequence[bool]) -> RoundObservation:
        """The observation of these requests alone, without from_lookup."""
        columns: dict[str, Any] = {"from_lookup": None}
        for name in ("num_drafted", "num_accepted", "path_ranks", "limits"):
            column = getattr(self, name)
            columns[name] = None if column is None else [*compress(column, kept)]
        return replace(self, **columns)


def merged(rounds: Sequence[RoundObservation]) -> RoundObservation:
    """Rounds of one kind as one; none of them has drafts from lookup."""
    drafted: list[int] = []
    accepted: list[int] = []
    limits: list[int] = []
    ranks: list[Sequence[int]] = []
    for one in rounds:
        drafted += one.num_drafted
        accepted += one.num_accepted
        limits += one.num_drafted if one.limits is None else one.limits
        ranks += one.path_ranks or ()
    given = one.batch_size, one.num_steps, drafted, accepted, one.num_nodes
    has_ranks, count = one.path_ranks is not None, len(rounds)
    return RoundObservation(*given, ranks if has_ranks else None, limits, num_rounds=count)


class PositionShares:
    """For each position, the share of trials that held: running shares with exponential forgetting.
    Each begins with a Beta prior whose mean is the share of the position before it."""

    def __init__(self, depth: int, prior: float) -> None:
        """prior: of the first position."""
        self.prior = prior
        self.tried = [0.0] * depth
        self.held = [0.0] * depth
        self._prior_count = [_PRIOR_COUNT] * depth

    def add(self, outcomes: Iterable[tuple[int, int, int, int]], num_rounds: int = 1) -> None:
        """outcomes: the first position tried, the one after the last, the first that did not hold,
        and the number of requests with this outcome."""
        depth = len(self.tried)
        tried, held = [0] * depth, [0] * depth
        for first, end, failed, count in outcomes:
            for position in range(first, min(end, depth)):
                tried[position] += count
                if position < failed:
                    held[position] += count
        for position, count in enumerate(tried):
            if count:
                kept = _kept(count, num_rounds)
                self.tried[position] = kept * self.tried[position] + count
                self.held[position] = kept * self.held[position] + held[position]
                self._prior_count[position] *= kept

    def chances(self) -> list[float]:
        """[depth], in 0..1."""
        chances: list[float] = []
        expected = self.prior
        for tried, held, prior in zip(self.tried, self.held, self._prior_count, strict=True):
            expected = (held + prior * expected) / (tried + prior)
            chances.append(expected)
        return chances


class RunningShare:
    """A share of requests, with exponential forgetting."""

    def __init__(self, prior: float) -> None:
        self._tried, self._held, self.value = _PRIOR_COUNT, prior * _PRIOR_COUNT, prior

    def add(self, tried: int, held: int, num_rounds: int = 1) -> None:
        kept = _kept(tried, num_rounds)
        self._tried = kept * self._tried + tried
        self._held = kept * self._held + held
        self.value = self._held / self._tried


class Acceptance:
    """The chance of each position that a draft is accepted there, given that all before it are, for
    chains, whole trees and trees cut to their best nodes.

    A smaller tree of the same depth has the nodes of the lowest ranks, so the accepted path of a
    round says how far that tree would have come. Learned are the chances of the smallest size, and
    of each further size how often it continues a path where the size before it ends. So a round of
    few nodes leaves what larger trees add unchanged, and no size is expected to come less far than
    a smaller one. Drafts without ranks are never cut: they count for all sizes alike.

    Only outcomes of past rounds enter, so choosing by it biases no sampled draft.
    """

    is_hybrid = False

    def __init__(self, depth: int, sizes: Sequence[int] = ()) -> None:
        """sizes: nodes of the cut trees, root included."""
        self.depth = depth
        self.sizes = sorted(sizes)
        self.has_ranks = False  # whether a round ever had them
        self.smallest = PositionShares(depth, _PRIOR)
        self.rescues = [PositionShares(depth, _PRIOR_RESCUE) for _ in self.sizes]
        # Drafts from which on a size differs from the one before. Shallow trees may have fewer.
        self._least_drafted = [*(size - 1 for size in self.sizes[1:]), *self.sizes[-1:]]
        self._drafting = RunningShare(1.0)

    @property
    def coverage(self) -> float:
        """The share of requests that have a draft in a round with drafts."""
        return self._drafting.value

    def mean_levels(self, num_steps: int, batch_size: int = 1) -> float:
        """Levels of a request that has a draft, where num_steps are asked for."""
        return num_steps

    def levels(self, observation: RoundObservation) -> Sequence[int]:
        """Levels that each request drafted."""
        levels, most = observation.levels, observation.num_steps
        return levels if max(levels, default=0) <= most else [min(one, most) for one in levels]

    def observe(self, observation: RoundObservation) -> None:
        # Requests with equal outcomes are counted first: they are few kinds, and the host does this
        # between two rounds.
        has_ranks, num_rounds = observation.path_ranks is not None, observation.num_rounds
        self.has_ranks |= has_ranks
        levels, accepted = self.levels(observation), self._accepted_by_size(observation)
        counts = Counter(zip(levels, accepted[0], strict=True))
        drafting = sum(count for (level, _), count in counts.items() if level)
        self._drafting.add(counts.total(), drafting, num_rounds)
        paths = ((0, min(level, held + 1), held, n) for (level, held), n in counts.items())
        self.smallest.add(paths, num_rounds)
        for index, (small, large) in enumerate(pairwise(accepted)):
            kinds: Iterable[tuple[int, int, int]] = zip(small, levels, large, strict=True)
            if has_ranks and observation.num_steps != self.depth:
                least = self._least_drafted[index]
                kinds = compress(kinds, [drafted >= least for drafted in observation.num_drafted])
            self.rescues[index].add(((*kind, n) for kind, n in Counter(kinds).items()), num_rounds)

    def by_size(self, sizes: Iterable[int | None]) -> dict[int | None, list[float]]:
        """Chances, [depth] in 0..1, by num_nodes; None is the whole tree."""
        found = [self.smallest.chances()]
        reach = list(accumulate(found[0], mul))
        for rescue in self.rescues:
            pairs = zip(reach, rescue.chances(), strict=True)
            reach = [old + (1.0 - old) * rescued for old, rescued in pairs]
            found.append(conditional(reach))
        return {size: found[self._index(size)] for size in sizes}

    def _index(self, num_nodes: int | None) -> int:
        return len(self.sizes) if num_nodes is None else bisect_left(self.sizes, num_nodes)

    def _accepted_by_size(self, observation: RoundObservation) -> list[Sequence[int]]:
        """What each size up to that of the round would have accepted, ascending, by request."""
        ranks, accepted = observation.path_ranks, observation.num_accepted
        if ranks is None:
            return [accepted] * (1 + len(self.sizes))
        smaller = self.sizes[: self._index(observation.cut_size)]
        return [*([bisect_left(one, size) for one in ranks] for size in smaller), accepted]


class HybridAcceptance:
    """Acceptance where a request drafts from lookup or, if it has no match, from a model.

    Both sources are learned separately; one depth is chosen for both. The model drafts at most
    model_steps levels, so deeper positions are lookup's, and count for the share of requests that
    have a match.
    """

    is_hybrid = True

    def __init__(
        self, depth: int, model_steps: int, sizes: Sequence[int] = (), pads: bool = False
    ) -> None:
        """depth: of lookup, at least model_steps. pads: a round costs as if all requests drafted as
        deep as the deepest one, which is so in graphs."""
        self._pads = pads
        self.model = Acceptance(model_steps, sizes)
        self.lookup = Acceptance(depth, sizes)
        self._matches = RunningShare(_PRIOR_LOOKUP)

    @property
    def has_ranks(self) -> bool:
        return self.model.has_ranks or self.lookup.has_ranks

    @property
    def coverage(self) -> float:
        """As Acceptance.coverage."""
        matches = self._matches.value
        return matches + (1.0 - matches) * self.model.coverage

    @property
    def lookup_share(self) -> float:
        """The share of drafted requests whose drafts are from lookup."""
        return self._matches.value / self.coverage if self.coverage else 0.0

    def mean_levels(self, num_steps: int, batch_size: int = 1) -> float:
        """Levels of a request that has a draft, where num_steps are asked for."""
        own, share = min(num_steps, self.model.depth), self.lookup_share
        if self._pads:  # the chance that any request of the batch has a match
            share = 1.0 - (1.0 - self._matches.value) ** batch_size
        return own + share * (num_steps - own)

    def levels(self, observation: RoundObservation) -> list[int]:
        """Levels that each request drafted; with padding, those of the graph that ran, which has
        the chosen depth as soon as one match is deeper than the model drafts."""
        num_steps = observation.num_steps
        own = min(num_steps, self.model.depth)
        most = [num_steps if is_lookup else own for is_lookup in _from_lookup(observation)]
        found = [*map(min, observation.levels, most)]
        deepest = max(found)
        padded = num_steps if deepest > own else deepest
        return [padded] * len(found) if self._pads else found

    def observe(self, observation: RoundObservation) -> None:
        has_draft = (level > 0 for level in observation.levels)
        has_match = [*map(and_, _from_lookup(observation), has_draft)]
        self._matches.add(len(has_match), sum(has_match), observation.num_rounds)
        is_model = [*map(not_, has_match)]
        if any(is_model):
            most = min(observation.num_steps, self.model.depth)
            self.model.observe(replace(observation.of_requests(is_model), num_steps=most))
        if any(has_match):
            self.lookup.observe(observation.of_requests(has_match))

    def by_size(self, sizes: Iterable[int | None]) -> dict[int | None, list[float]]:
        """As Acceptance.by_size."""
        sizes, share = list(sizes), self.lookup_share
        lookups, models = self.lookup.by_size(sizes), self.model.by_size(sizes)
        found: dict[int | None, list[float]] = {}
        for size in sizes:
            own = [*accumulate(models[size], mul)]
            own += [0.0] * (self.lookup.depth - len(own))
            pairs = zip(own, accumulate(lookups[size], mul), strict=True)
            found[size] = conditional(share * match + (1.0 - share) * one for one, match in pairs)
        return found


def conditional(reach: Iterable[float]) -> list[float]:
    """The chance of each position, given those before it, from the chance that a path comes so far.
    Positions forget separately, so one may seem reached more often than those before it: it is
    clipped to them."""
    paths = list(accumulate(reach, min))
    steps = zip([1.0, *paths[:-1]], paths, strict=True)
    return [after / before if before else 0.0 for before, after in steps]


def _from_lookup(observation: RoundObservation) -> Sequence[bool]:
    return observation.from_lookup or [False] * len(observation.num_drafted)


def _kept(count: int, num_rounds: int) -> float:
    """The weight of past outcomes after so many new ones."""
    kept, least = 1.0 - count / _MEMORY, _LEAST_KEPT**num_rounds
    return kept if kept > least else least
