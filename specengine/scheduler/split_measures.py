"""What the policy of split prompts remembers of what it measured."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field

_NEW = 0.25  # weight of a new measurement in the running mean
_UNSEEN_ANSWER = 2.0  # seconds of an answer, before one has ended
_MOST_ROUNDS = 4096  # that are remembered, and once more as many


@dataclass
class Mean:
    """Of measurements, the newer the heavier, without the first `skips`. None before. falls: one
    that is less than half of the mean replaces it, as a call may stall and never hurries. count: of
    measurements, those that were skipped too. last: round of the last one."""

    value: float | None = None
    skips: int = 0
    falls: bool = False
    count: int = 0
    last: int = 0

    def add(self, value: float, now: int = 0, weight: float = 1.0) -> None:
        """weight: beside the one of a usual measurement, at most 1."""
        self.last, self.count = now, self.count + 1
        if self.skips:
            self.skips -= 1
            return
        if self.value is None or (self.falls and 2.0 * value < self.value):
            self.value = value
        else:
            self.value += weight * _NEW * (value - self.value)

    def forget_before(self, last: int) -> None:
        """What is older than that. Nothing is skipped again."""
        if self.last < last:
            self.value, self.count = None, 0


@dataclass
class RecentRounds:
    """Seconds that rounds took, and that they would have taken without prompts. The quotient of an
    answer that ends now is how many times as long its tokens took.

    seconds: of an answer. _taken, _alone: sums since the first round that is remembered, before
    each round and behind the last one.
    """

    seconds: float = _UNSEEN_ANSWER
    _taken: list[float] = field(default_factory=lambda: [0.0])
    _alone: list[float] = field(default_factory=lambda: [0.0])

    @property
    def ratio(self) -> float:
        """1.0 before a round was seen; infinite where there was none in an answer's time."""
        taken, alone = self._within(self.seconds)
        if not taken:
            return 1.0
        return taken / alone if alone else math.inf

    def add(self, taken: float, alone: float) -> None:
        self._taken.append(self._taken[-1] + taken)
        self._alone.append(self._alone[-1] + alone)
        if len(self._taken) > 2 * _MOST_ROUNDS:
            self._taken = self._since(self._taken)
            self._alone = self._since(self._alone)

    def after(self, seconds: float, slowdown: float) -> float:
        """The quotient of an answer that ends once rounds have been so much slower for so many
        seconds more."""
        seconds = min(seconds, self.seconds)
        taken, alone = self._within(self.seconds - seconds)
        return (taken + seconds) / (alone + seconds / slowdown)

    def _within(self, seconds: float) -> tuple[float, float]:
        """The sums of the last so many seconds; of a round that began before, its part."""
        end, start = self._taken[-1], self._taken[-1] - seconds
        if start <= 0.0:
            return end, self._alone[-1]
        first = bisect_left(self._taken, start)
        alone = self._alone[-1] - self._alone[first]
        part = self._taken[first] - start
        if part > 0.0:
            whole = self._taken[first] - self._taken[first - 1]
            alone += part / whole * (self._alone[first] - self._alone[first - 1])
        return seconds, alone

    @staticmethod
    def _since(sums: list[float]) -> list[float]:
        """Of the last rounds. They begin at 0 again, so that they stay exact."""
        return [one - sums[-_MOST_ROUNDS] for one in sums[-_MOST_ROUNDS:]]
