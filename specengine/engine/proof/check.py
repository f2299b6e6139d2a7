"""What a proof says: one measured number against one bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Sense = Literal["<=", ">="]


CHI_SQUARED = "χ² of the engine"
AS_REPORTED = "drafts as reported"


@dataclass(frozen=True)
class Check:
    """check: what was done; subject: to what. passed: statistic sense threshold."""

    check: str
    subject: str
    statistic: float
    sense: Sense
    threshold: float
    note: str = ""

    @property
    def passed(self) -> bool:
        if self.sense == "<=":
            return self.statistic <= self.threshold
        return self.statistic >= self.threshold


def combined_p(p_values: Sequence[float]) -> float:
    """The p-value of independent tests taken together (Fisher 1925): small where many are a little
    small."""
    least = 1e-300  # a p-value of 0 is one that underflowed
    total = -sum(math.log(max(p, least)) for p in p_values)
    size = torch.tensor(float(len(p_values)), dtype=torch.float64)
    return float(torch.special.gammaincc(size, torch.tensor(total, dtype=torch.float64)))


def chi_squared_p(observed: Tensor, expected: Tensor) -> float:
    """Pearson's goodness of fit of counts to expected counts (any shape, equal sums): the chance of
    a statistic at least this large. Neighbours that expect fewer than five are taken together. A
    count where nothing is expected gives 0."""
    observed, expected = observed.double().flatten(), expected.double().flatten()
    if bool((observed[expected <= 0] > 0).any()):
        return 0.0
    groups = torch.tensor(_groups(expected.tolist()))
    seen, due = (
        torch.zeros(int(groups.max()) + 1, dtype=torch.float64).index_add_(0, groups, x)
        for x in (observed, expected)
    )
    statistic = ((seen - due) ** 2 / due).sum()
    freedom = torch.tensor(max(len(due) - 1, 1), dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


def _groups(expected: list[float], least: float = 5.0) -> list[int]:
    """The number of each cell's group. Groups are runs that expect `least` or more; what is left at
    the end joins the last one."""
    groups, number, due = [], 0, 0.0
    left = sum(expected)
    for one in expected:
        if due >= least and left >= least:
            number, due = number + 1, 0.0
        groups.append(number)
        due, left = due + one, left - one
    return groups
