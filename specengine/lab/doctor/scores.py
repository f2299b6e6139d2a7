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
    sums = _sums(judged, _size(judged))
    return Score(
        ratio(sums.first, sums.rows, sums.drawings),
        ratio(sums.tau, sums.rows, sums.drawings),
        float(judged.logprobs.mean()),
    )


def gain(after: Judgement, before: Judgement) -> Gain:
    """Prompts are the same, so that they are paired; one may be judged in one of the two alone."""
    size = max(_size(after), _size(before))
    new, old = _sums(after, size), _sums(before, size)
    return Gain(
        ratio_difference((new.first, new.rows), (old.first, old.rows), new.drawings, LEVEL),
        ratio_difference((new.tau, new.rows), (old.tau, old.rows), new.drawings, LEVEL),
    )


@dataclass(frozen=True)
class _Sums:
    """[P] each: over the rows of a prompt."""

    first: Array
    tau: Array
    rows: Array
    drawings: Floats


def _size(judged: Judgement) -> int:
    return int(judged.prompts.max()) + 1


def _sums(judged: Judgement, size: int) -> _Sums:
    first = per_prompt(judged.hits[:, 0], judged.prompts, size)
    tau = per_prompt(1 + judged.accepted, judged.prompts, size)
    rows = per_prompt(np.ones(len(judged.prompts)), judged.prompts, size)
    return _Sums(first, tau, rows, _drawings(size))


@lru_cache
def _drawings(num_prompts: int) -> Floats:
    return draw_prompts(np.zeros(num_prompts), DRAWINGS, seed=0)
