"""How often drafts stand, by their place in the draft."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate

_PRIOR = 0.7  # of the first place; each further one is expected to be like the one before it
_PRIOR_COUNT = 4.0
_MEMORY = 200  # drafts
_MEMORY_ROUNDS = 16  # where a round has many drafts
_LEAST = 1.0 - 1.0 / _MEMORY_ROUNDS


class Shares:
    """Of each place, how often something held there: a running share with exponential forgetting,
    which begins with a Beta prior, and is expected to be like that of the place before it."""

    def __init__(self, depth: int, prior: float) -> None:
        self.prior = prior  # of the first place
        self.tried = [0.0] * depth
        self.held = [0.0] * depth
        self._prior_count = [_PRIOR_COUNT] * depth

    def add(self, place: int, tried: int, held: int, rounds: int = 1) -> None:
        if tried:
            kept = _kept(tried, rounds)
            self.tried[place] = kept * self.tried[place] + tried
            self.held[place] = kept * self.held[place] + held
            self._prior_count[place] *= kept

    def add_all(self, paths: Iterable[tuple[int, int, int, int]], rounds: int = 1) -> None:
        """Of outcomes that are alike: the first place that was tried, the one behind the last, that
        from which on nothing held, and how many there were."""
        depth = len(self.tried)
        tried, stood = [0] * depth, [0] * depth
        for first, end, held, count in paths:
            for place in range(first, min(end, depth)):
                tried[place] += count
                if place < held:
                    stood[place] += count
        for place, outcome in enumerate(zip(tried, stood, strict=True)):
            self.add(place, *outcome, rounds)

    def chances(self) -> list[float]:
        """[depth], in 0..1."""
        chances: list[float] = []
        expected = self.prior
        for tried, held, prior in zip(self.tried, self.held, self._prior_count, strict=True):
            expected = (held + prior * expected) / (tried + prior)
            chances.append(expected)
        return chances


class RunningShare:
    """Of what is asked for, likewise."""

    def __init__(self, prior: float) -> None:
        self._asked, self._held = _PRIOR_COUNT, prior * _PRIOR_COUNT

    def add(self, asked: int, held: int, rounds: int = 1) -> None:
        kept = _kept(asked, rounds)
        self._asked = kept * self._asked + asked
        self._held = kept * self._held + held

    @property
    def value(self) -> float:
        return self._held / self._asked


def conditional(reach: Iterable[float]) -> list[float]:
    """The chance of each place, given those above it, of the chances that a path comes so far. A
    place has its own memory: it is taken to be reached no more often than those above it."""
    paths = list(accumulate(reach, min))
    steps = zip([1.0, *paths[:-1]], paths, strict=True)
    return [after / before if before else 0.0 for before, after in steps]


class Acceptance:
    """Of each place, the chance that a draft stands there, given that those above it do.

    It learns from what came of past rounds, and nothing of a round that is not verified yet, so
    that acting on it biases no sampled draft.
    """

    def __init__(self, depth: int) -> None:
        self.shares = Shares(depth, _PRIOR)
        self._drafting = RunningShare(1.0)  # of requests

    def observe(self, drafted: Sequence[int], accepted: Sequence[int], rounds: int = 1) -> None:
        """So many rounds that were to draft, by request: levels drafted, and how many of them
        stood."""
        self.count(Counter(zip(drafted, accepted, strict=True)), rounds)

    def count(self, pairs: Counter[tuple[int, int]], rounds: int = 1) -> None:
        """Likewise, requests that are alike taken together."""
        drafting = sum(count for (levels, _), count in pairs.items() if levels)
        self._drafting.add(pairs.total(), drafting, rounds)
        paths = ((0, min(levels, kept + 1), kept, count) for (levels, kept), count in pairs.items())
        self.shares.add_all(paths, rounds)

    @property
    def coverage(self) -> float:
        """The share of requests that have a draft in such a round."""
        return self._drafting.value

    def chances(self) -> list[float]:
        """[depth], in 0..1."""
        return self.shares.chances()


def _kept(count: int, rounds: int) -> float:
    """The share of what is known that stays beside so many new outcomes."""
    kept, least = 1.0 - count / _MEMORY, _LEAST**rounds
    return kept if kept > least else least
