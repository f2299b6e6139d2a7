"""Runs beside each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from specengine.lab.accept.bootstrap import Array
from specengine.lab.accept.measure import Run
from specengine.lab.accept.report import RunResult
from specengine.lab.accept.statistics import Sample
from specengine.lab.accept.summary import Difference, Summary


@dataclass(frozen=True)
class Kept:
    """A run that others are held against."""

    setting: str
    temperature: float
    run: Run
    sample: Sample


def run_result(kept: Kept, first: Kept, summary: Summary) -> RunResult:
    """first: the run whose answers are in the conversations."""
    ours, theirs = kept.run.answers, first.run.answers
    shared = ours.keys() & theirs.keys()
    return RunResult(
        temperature=kept.temperature,
        conversation=first.setting,
        answers=len(ours),
        same_answers=sum(ours[key].token_ids == theirs[key].token_ids for key in shared),
        seconds=kept.run.seconds,
        skipped=tuple(kept.run.skipped),
        summary=summary,
    )


def differences(kept: Sequence[Kept], set_names: Sequence[str], set_of: Array) -> list[Difference]:
    """Of each two settings at the same temperature, the later less the earlier: over all prompts,
    and, where there are several, of each prompt set. set_of: of each prompt."""
    pairs = [
        (later, earlier)
        for earlier, later in combinations(kept, 2)
        if earlier.temperature == later.temperature
    ]
    return [
        Difference(
            first=later.setting,
            second=earlier.setting,
            temperature=later.temperature,
            label=label,
            tau=later.sample.tau_less(
                earlier.sample, chosen[later.sample.prompts], chosen[earlier.sample.prompts]
            ),
        )
        for later, earlier in pairs
        for label, chosen in _choices(set_names, set_of)
    ]


def _choices(set_names: Sequence[str], set_of: Array) -> Iterator[tuple[str, Array]]:
    """bool [P], which prompts."""
    yield "all", set_of >= 0
    if len(set_names) > 1:
        for number, name in enumerate(set_names):
            yield name, set_of == number
