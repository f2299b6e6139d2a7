"""Plans of the repository: each command is understood, and two cards run all of a plan in time."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.jobs.check import problem_of
from benchmarks.jobs.plan import Job, on_cards, read_plan
from benchmarks.jobs.schedule import Schedule
from tests.test_layering import ROOT

PLANS = sorted((ROOT / "benchmarks/plans").glob("*.yaml"))
LEASE = 560 - 15  # seconds; what the lease keeps for its end is not the jobs'
CARDS = ("0", "1")


def seconds_of(jobs: list[Job]) -> float:
    """When the last of them ends on two cards, each as long as expected."""
    schedule, now = Schedule(on_cards(jobs, len(CARDS)), CARDS, deadline=10_000), 0.0
    while schedule.waiting or schedule.running:
        schedule.start(now)
        first = min(schedule.running, key=lambda one: one.ends)
        now = first.ends
        schedule.end(first)
    return now


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_commands_of_a_plan_are_understood(path: Path) -> None:
    problems = {job.name: problem_of(job, ROOT) for job in read_plan(path)}
    assert problems
    assert {name: problem for name, problem in problems.items() if problem} == {}


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_plan_fits_into_a_lease_of_two_cards(path: Path) -> None:
    assert seconds_of(read_plan(path)) <= LEASE


def test_names_of_jobs_are_unique_among_plans() -> None:
    names = [job.name for path in PLANS for job in read_plan(path)]
    assert len(PLANS) > 5
    assert sorted(set(names)) == sorted(names)
