"""What stands for batches of about one size, and the rules by which it changes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from specengine.engine.adaptive.budget import ProbeBudget
from specengine.engine.adaptive.choice import Decision, Outlook, Shape


@dataclass(frozen=True)
class Policy:
    margin: float = 0.03  # gain for which the depth is changed
    min_rounds: int = 16  # between changes, and before rounds are learned from several at a time
    sure: float = 1.25  # gain below which the cost of plain decoding is seen to before all else
    probe_every: int = 2  # rounds at least: one may be launched before the last has landed
    deep_tries: int = 2  # of the first rounds, where costs are to be learned
    # Likewise, and whenever plain decoding is tried again: in a row, for only a plain round behind
    # another costs what plain decoding costs.
    plain_tries: int = 4


@dataclass
class Place:
    """What stands for a bucket of batch sizes."""

    standing: Decision | None = None
    round: int = 0
    changed: int = 0  # round of the last change
    probed: int = 0
    last_probe: Shape | None = None
    tries: Counter[Shape] = field(default_factory=Counter)
    plain_left: int = 0  # of the plain rounds that are being tried
    last_run: dict[Shape, int] = field(default_factory=dict)
    budget: ProbeBudget = field(default_factory=ProbeBudget)
    unearned: int = 0  # rounds of the shape that stands, for which it has not earned yet
    quiet: Outlook | None = None  # by which there was nothing to change, and nothing to try
