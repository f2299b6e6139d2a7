"""All that is said of one setting at one temperature, and of two settings beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specengine.lab.accept.bootstrap import Array, Estimate
from specengine.lab.accept.statistics import (
    CONTEXT_EDGES,
    ENTROPY_EDGES,
    Bucket,
    Calibration,
    Endings,
    Group,
    Position,
    Sample,
    calibration,
    decisions_by_entropy,
    endings,
    group,
    groups_by_value,
    histogram,
    outside_share,
    positions,
)


@dataclass(frozen=True)
class PromptLabels:
    """Of each prompt of a run, [P]; `set_names` and `categories` are what the numbers stand for."""

    set_of: Array  # int64
    category_of: Array  # int64
    set_names: Sequence[str]
    categories: Sequence[str]


@dataclass(frozen=True)
class Summary:
    overall: Group
    by_set: tuple[Group, ...]
    by_category: tuple[Group, ...]
    by_turn: tuple[Group, ...]
    by_context: tuple[Group, ...]  # tokens up to the root
    by_entropy: tuple[Group, ...]  # of the distribution that the first position is held against
    decisions_by_entropy: tuple[Bucket, ...]
    positions: tuple[Position, ...]
    histogram: tuple[int, ...]  # rounds that emitted 1, 2, … tokens
    endings: Endings
    drafted_per_round: float
    outside_vocabulary: float | None  # share of emitted tokens that the draft cannot say
    calibration: Calibration | None


@dataclass(frozen=True)
class Difference:
    """τ of one setting less τ of another, on the same prompts."""

    first: str
    second: str
    temperature: float
    label: str  # prompt set, or "all"
    tau: Estimate

    @property
    def is_clear(self) -> bool:
        """Its interval does not hold 0."""
        return self.tau.low > 0 or self.tau.high < 0


def summarise(sample: Sample, turns: Array, labels: PromptLabels, known: Array | None) -> Summary:
    """turns: of each round, from 0. known: bool [V], the draft's vocabulary; None where it
    is the target's."""
    table, prompts = sample.table, sample.prompts
    every = np.ones(len(table), dtype=bool)

    def groups(values: Array, names: Sequence[str]) -> tuple[Group, ...]:
        return tuple(group(sample, values == value, names[value]) for value in np.unique(values))

    turn_names = [f"turn {turn + 1}" for turn in range(int(turns.max(initial=0)) + 1)]
    return Summary(
        overall=group(sample, every, "all"),
        by_set=groups(labels.set_of[prompts], labels.set_names),
        by_category=groups(labels.category_of[prompts], labels.categories),
        by_turn=groups(turns, turn_names),
        by_context=groups_by_value(sample, table.context, CONTEXT_EDGES),
        by_entropy=groups_by_value(sample, table.entropy[:, 0], ENTROPY_EDGES),
        decisions_by_entropy=decisions_by_entropy(sample),
        positions=positions(sample, known),
        histogram=histogram(table),
        endings=endings(table, known),
        drafted_per_round=float(table.num_drafted.mean()) if len(table) else float("nan"),
        outside_vocabulary=outside_share(table, known),
        calibration=calibration(sample),
    )
