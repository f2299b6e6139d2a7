"""What a proof says: one measured number against one bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Sense = Literal["<=", ">="]


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


def chi_squared_p(observed: Tensor, expected: Tensor) -> float:
    """Pearson's goodness of fit of counts to expected counts (any shape, equal sums): the chance of
    a statistic at least this large. Cells that expect fewer than five are taken as one. A count
    where nothing is expected gives 0."""
    observed, expected = observed.double().flatten(), expected.double().flatten()
    if bool((observed[expected <= 0] > 0).any()):
        return 0.0
    common = expected >= 5
    seen, due = (torch.cat([x[common], x[~common].sum()[None]]) for x in (observed, expected))
    seen, due = seen[due > 0], due[due > 0]
    statistic = ((seen - due) ** 2 / due).sum()
    freedom = torch.tensor(max(len(due) - 1, 1), dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))
