"""Acceptance as configured against acceptance under a hypothesis, on the same texts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from specengine.lab.accept.bootstrap import (
    Array,
    Estimate,
    Floats,
    draw_prompts,
    per_prompt,
    ratio,
    ratio_difference,
)
from specengine.lab.doctor.draft_rows import Judgement

DRAWINGS = 2000
# Some forty hypotheses are tried, and each may gain by chance.
LEVEL = 0.999


@dataclass(frozen=True)
class Score:
    """first: acceptance of the first drafted token. tau: tokens that a chain of draft_rows.LEVELS
    steps would emit, the bonus token included, on average over the rows. logprob: of the target's
    token on the first level."""

    first: Estimate
    tau: Estimate
    logprob: float


@dataclass(frozen=True)
class Gain:
    """Of acceptance of the first token, and of tau, with intervals of LEVEL."""

    first: Estimate
    tau: Estimate


def score(judged: Judgement) -> Score:
    first, tau, count, drawings = _sums(judged)
    tau_estimate = ratio(tau, count, drawings)
    return Score(ratio(first, count, drawings), tau_estimate, float(judged.logprobs.mean()))


def gain(after: Judgement, before: Judgement) -> Gain:
    """Prompts are the same, so that they are paired."""
    first_after, tau_after, count_after, drawings = _sums(after)
    first, tau, count, _ = _sums(before)
    return Gain(
        ratio_difference((first_after, count_after), (first, count), drawings, LEVEL),
        ratio_difference((tau_after, count_after), (tau, count), drawings, LEVEL),
    )


def _sums(judged: Judgement) -> tuple[Array, Array, Array, Floats]:
    size = int(judged.prompts.max()) + 1
    first = per_prompt(judged.hits[:, 0], judged.prompts, size)
    tau = per_prompt(1 + judged.accepted, judged.prompts, size)
    count = per_prompt(np.ones(len(judged.prompts)), judged.prompts, size)
    return first, tau, count, _drawings(size)


@lru_cache
def _drawings(num_prompts: int) -> Floats:
    return draw_prompts(np.zeros(num_prompts), DRAWINGS, seed=0)
