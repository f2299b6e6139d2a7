"""Ratios of sums over prompts, with bootstrap intervals (Efron 1979).

The rounds of one prompt resemble each other, so that whole prompts are drawn, with replacement, and
not rounds. Drawings are counts [D, P]: how often each of P prompts is in each of D samples; a
difference between two settings is taken within each sample, which pairs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Array = NDArray[Any]


@dataclass(frozen=True)
class Estimate:
    """A number and the interval that it lies in. NaN where nothing was counted; the interval is
    NaN where fewer than two prompts contribute."""

    value: float
    low: float
    high: float
    count: int  # of the denominator: rounds, or decisions
    prompts: int  # with any of them


def draw_prompts(strata: Array, num_draws: int, seed: int) -> Floats:
    """[D, P] counts. strata [P]: each is resampled by itself, so that every sample has as many
    prompts of each prompt set as were measured."""
    generator = np.random.default_rng(seed)
    drawings = np.zeros((num_draws, len(strata)))
    for stratum in np.unique(strata):
        members = np.flatnonzero(strata == stratum)
        chances = np.full(len(members), 1 / len(members))
        drawings[:, members] = generator.multinomial(len(members), chances, size=num_draws)
    return drawings


def ratio(above: Array, below: Array, drawings: Floats, level: float = 0.95) -> Estimate:
    """Σ above / Σ below over prompts (both [P]), with the percentile interval of `level`."""
    low, high = _interval(_ratios(above, below, drawings), level)
    prompts = int(np.count_nonzero(below))
    if prompts < 2:
        low = high = float("nan")
    return Estimate(_divide(above.sum(), below.sum()), low, high, int(below.sum()), prompts)


def ratio_difference(
    first: tuple[Array, Array],
    second: tuple[Array, Array],
    drawings: Floats,
    level: float = 0.95,
) -> Estimate:
    """The ratio of `first` (above, below) less that of `second`, over the same prompts."""
    differences = _ratios(*first, drawings) - _ratios(*second, drawings)
    low, high = _interval(differences, level)
    both = np.count_nonzero((first[1] > 0) & (second[1] > 0))
    if both < 2:
        low = high = float("nan")
    values = [_divide(above.sum(), below.sum()) for above, below in (first, second)]
    count = int(min(first[1].sum(), second[1].sum()))
    return Estimate(values[0] - values[1], low, high, count, int(both))


def per_prompt(values: Array, prompts: Array, num_prompts: int) -> Floats:
    """[P], the sum of `values` (one a round or decision) over those of each prompt."""
    sums = np.zeros(num_prompts)
    np.add.at(sums, prompts, values)
    return sums


def _ratios(above: Array, below: Array, drawings: Floats) -> Floats:
    """[D]; NaN for samples in which nothing was counted."""
    sums, totals = drawings @ above, drawings @ below
    ratios = np.full(len(totals), np.nan)
    np.divide(sums, totals, out=ratios, where=totals > 0)
    return ratios


def _interval(samples: Floats, level: float) -> tuple[float, float]:
    known = samples[~np.isnan(samples)]
    if len(known) == 0:
        return float("nan"), float("nan")
    low, high = np.quantile(known, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _divide(above: float, below: float) -> float:
    return float(above / below) if below else float("nan")
