"""Which depth is worth its cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specengine.engine.adaptive.cost_table import Costs


@dataclass(frozen=True)
class Decision:
    """expected_gain: tokens a second over those of plain decoding; None while costs are unknown."""

    num_steps: int
    reason: str
    expected_gain: float | None


@dataclass(frozen=True)
class Outlook:
    """What each depth promises a batch, by num_steps, in rounds in which anybody has a draft: the
    others are the same whatever is chosen."""

    batch_size: int
    chances: Sequence[float]
    tokens: dict[int, float]  # a request and round
    seconds: dict[int, float]  # a round
    rates: dict[int, float]  # tokens a second

    def gain(self, num_steps: int) -> float:
        return self.rates[num_steps] / self.rates[0]

    @property
    def best(self) -> int:
        """The shallowest of equals: depths are in ascending order."""
        return max(self.rates, key=self.rates.__getitem__)

    def decide(self, num_steps: int) -> Decision:
        gain = self.gain(num_steps)
        chances = " ".join(f"{chance:.2f}" for chance in self.chances)
        reason = (
            f"batch {self.batch_size}: K={num_steps}, {gain:.2f}x of none; acceptance {chances}"
            if num_steps
            else f"batch {self.batch_size}: K=0, the best draft K={self._best_draft} would be "
            f"{self.gain(self._best_draft):.2f}x of none; acceptance {chances}"
        )
        return Decision(num_steps, reason, gain)

    @property
    def _best_draft(self) -> int:
        return max((steps for steps in self.rates if steps), key=self.rates.__getitem__)


def expected_tokens(chances: Sequence[float]) -> list[float]:
    """Of chains of 0, 1, .. len(chances) drafts, the bonus token included."""
    tokens, path = [1.0], 1.0
    for chance in chances:
        path *= chance
        tokens.append(tokens[-1] + path)
    return tokens


def outlook(
    batch_size: int, chances: Sequence[float], coverage: float, seconds: dict[int, float]
) -> Outlook:
    """coverage: share of requests that draft. seconds: of a round of each depth, ascending, 0
    among them."""
    by_depth = expected_tokens(chances)
    tokens = {steps: 1.0 + coverage * (by_depth[steps] - 1.0) for steps in seconds}
    rates = {steps: batch_size * tokens[steps] / cost for steps, cost in seconds.items()}
    return Outlook(batch_size, chances, tokens, seconds, rates)


def seconds_of(
    costs: Costs, batch_size: int, coverage: float, steps: Sequence[int]
) -> dict[int, float] | None:
    """Of a round of each depth; None where they are not known."""
    found = {one: costs.of(batch_size, coverage * one) for one in steps}
    known = {one: seconds for one, seconds in found.items() if seconds is not None}
    return known if len(known) == len(steps) else None
