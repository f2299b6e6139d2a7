"""When jobs start and on which cards: order, sharing, and jobs that wait for more."""

from __future__ import annotations

import random

import pytest

from benchmarks.jobs.plan import Job
from benchmarks.jobs.schedule import Placed, Schedule

FAR = 1000.0


def job(name: str, seconds: float = 10, **more: object) -> Job:
    return Job(name, "x", seconds, limit=2 * seconds, **more)  # type: ignore[arg-type]


def names(placed: list[Placed]) -> list[str]:
    return [one.job.name for one in placed]


def test_longer_jobs_start_first_within_a_priority() -> None:
    jobs = [job("short", 5), job("late", 50, priority=2), job("long", 20), job("first", 1)]
    jobs[3] = job("first", 1, priority=-1)
    schedule = Schedule(jobs, ["0", "1"], FAR)
    started = schedule.start(0)
    assert names(started) == ["first", "long"]
    schedule.end(started[0])
    assert names(schedule.start(1)) == ["short"]


def test_job_has_its_card_to_itself_and_takes_the_free_one() -> None:
    schedule = Schedule([job("a"), job("b"), job("c")], ["4", "7"], FAR)
    started = schedule.start(0)
    assert [one.cards for one in started] == [("4",), ("7",)]
    schedule.end(started[1])
    assert [(one.job.name, one.cards) for one in schedule.start(1)] == [("c", ("7",))]


def test_jobs_share_a_card_where_both_say_so() -> None:
    jobs = [job("a", 9, beside="card"), job("b", 8, beside="card"), job("c", 7)]
    started = Schedule(jobs, ["0"], FAR).start(0)
    assert names(started) == ["a", "b"]
    jobs = [job("a", 9, beside="card"), job("b", 8, beside="card")]
    assert [one.cards for one in Schedule(jobs, ["0", "1"], FAR).start(0)] == [("0",), ("1",)]


def test_job_beside_nothing_waits_for_all_and_keeps_all_away() -> None:
    alone = job("alone", 9, beside="nothing")
    jobs = [alone, job("a", 20, cards=0), job("b", 30, priority=1)]
    schedule = Schedule(jobs, ["0"], FAR)
    (first,) = schedule.start(0)
    assert first.job.name == "a"
    schedule.end(first)
    (second,) = schedule.start(20)
    assert second.job.name == "alone"
    assert schedule.start(21) == []
    schedule.end(second)
    assert names(schedule.start(30)) == ["b"]


def test_job_that_waits_for_two_cards_is_not_delayed_by_shorter_ones_behind_it() -> None:
    jobs = [job("one", 20), job("pair", 10, cards=2), job("long", 9), job("short", 8, priority=1)]
    jobs[2] = job("long", 30, priority=1)
    schedule = Schedule(jobs, ["0", "1"], FAR)
    started = schedule.start(0)
    assert names(started) == ["one", "short"], "long would end behind one, at which pair starts"
    for placed in started:
        schedule.end(placed)
    assert names(schedule.start(20)) == ["pair"]


def test_job_of_no_card_does_not_wait_behind_one_that_waits_for_cards() -> None:
    jobs = [job("a", 20), job("b", 15), job("host", 10, cards=0, priority=1)]
    assert names(Schedule(jobs, ["0"], FAR).start(0)) == ["a", "host"]


def test_number_of_jobs_without_a_card_is_limited() -> None:
    jobs = [job(str(number), cards=0) for number in range(5)]
    assert len(Schedule(jobs, [], FAR, without_cards=3).start(0)) == 3


def test_job_that_cannot_end_before_the_deadline_is_taken_away() -> None:
    schedule = Schedule([job("long", 30), job("short", 10)], ["0"], deadline=30)
    assert schedule.take_late(0) == []
    assert [one.name for one in schedule.take_late(0.5)] == ["long"]
    assert names(schedule.start(0.5)) == ["short"]


@pytest.mark.parametrize("seed", range(20))
def test_random_plans_never_overlap_where_they_must_not_and_all_jobs_run(seed: int) -> None:
    draw = random.Random(seed)
    kinds = ("machine", "card", "nothing")
    jobs = [
        job(
            str(number),
            draw.randint(1, 30),
            cards=draw.randint(0, 2),
            beside=draw.choice(kinds),
            priority=draw.randint(0, 2),
        )
        for number in range(12)
    ]
    schedule, now, seen = Schedule(jobs, ["0", "1"], FAR), 0.0, list[str]()
    while schedule.waiting or schedule.running:
        seen += names(schedule.start(now))
        running = schedule.running
        if any(one.job.beside == "nothing" for one in running):
            assert len(running) == 1
        for card in ("0", "1"):
            users = [one.job.beside for one in running if card in one.cards]
            assert len(users) <= 1 or set(users) == {"card"}
        assert all(len(set(one.cards)) == one.job.cards for one in running)
        ends = draw.choice(running)  # not always as expected
        now = max(now, ends.ends + draw.uniform(-0.5, 3))
        schedule.end(ends)
    assert sorted(seen) == sorted(one.name for one in jobs)
