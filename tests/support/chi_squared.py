"""Pearson's χ² test. scipy.stats has it too, and takes a second to import, in each process of a
run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike


@dataclass(frozen=True)
class Goodness:
    statistic: float
    pvalue: float


def chi_squared_tail(statistic: float, freedom: int) -> float:
    """The probability that χ² of so many degrees of freedom is at least this."""
    halves = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(*halves.unbind()))


def chisquare(
    observed: ArrayLike, expected: ArrayLike | None = None, sum_check: bool = True
) -> Goodness:
    """How well counts agree with expected ones, by default all the same. sum_check: their sums must
    agree as far as their dtype says; otherwise ValueError."""
    counts = np.asarray(observed)
    means = np.full(counts.shape, counts.mean()) if expected is None else np.asarray(expected)
    if counts.ndim != 1 or counts.shape != means.shape:
        raise ValueError(f"counts of shape {counts.shape}, and means of shape {means.shape}")
    precision = np.finfo(np.result_type(counts, means, np.float32)).eps ** 0.5
    counts, means = counts.astype(np.float64), means.astype(np.float64)
    if sum_check and not np.isclose(counts.sum(), means.sum(), rtol=precision, atol=0.0):
        raise ValueError(f"{counts.sum()} counts, of which {means.sum()} are expected")
    statistic = float(((counts - means) ** 2 / means).sum())
    return Goodness(statistic, chi_squared_tail(statistic, len(counts) - 1))
