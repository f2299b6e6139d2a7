"""Means and quotients of what was measured of rounds and layers."""

from __future__ import annotations

import pytest

from specengine.scheduler.split_measures import Mean, RecentRounds


def test_mean_skips_the_first_and_gives_the_newest_a_quarter() -> None:
    mean = Mean(skips=1)
    for value in (80.0, 4.0, 8.0):
        mean.add(value)
    assert mean.value == 5.0
    assert mean.count == 3


def test_mean_of_calls_falls_at_once_and_rises_slowly() -> None:
    usual, falling = Mean(), Mean(falls=True)
    for mean in (usual, falling):
        mean.add(8.0)
        mean.add(2.0)
    assert (usual.value, falling.value) == (6.5, 2.0)
    falling.add(10.0)
    assert falling.value == 4.0


def test_mean_forgets_what_is_old_and_skips_nothing_again() -> None:
    mean = Mean(skips=1)
    mean.add(3.0, now=1)
    mean.add(4.0, now=2)
    mean.forget_before(2)
    assert mean.value == 4.0
    mean.forget_before(3)
    assert (mean.value, mean.count) == (None, 0)
    mean.add(5.0, now=4)
    assert mean.value == 5.0


def test_quotient_is_of_the_rounds_of_one_answer() -> None:
    recent = RecentRounds(seconds=1.0)
    assert recent.ratio == 1.0
    for _ in range(20):
        recent.add(0.3, 0.1)
    assert recent.ratio == pytest.approx(3.0)
    for _ in range(20):
        recent.add(0.125, 0.125)
    assert recent.ratio == pytest.approx(1.0)


def test_quotient_to_come_joins_the_rounds_that_are_left_of_the_answer() -> None:
    recent = RecentRounds(seconds=1.0)
    for _ in range(32):
        recent.add(0.125, 0.125)
    assert recent.after(0.5, 2.0) == pytest.approx(1.0 / (0.5 + 0.25))
    assert recent.after(7.0, 2.0) == pytest.approx(2.0)


def test_long_delay_counts_with_the_part_that_an_answer_has_seen() -> None:
    recent = RecentRounds(seconds=1.0)
    for _ in range(8):
        recent.add(0.125, 0.125)
    recent.add(30.0, 0.0)
    assert recent.ratio == float("inf")
    for _ in range(4):
        recent.add(0.125, 0.125)
    assert recent.ratio == pytest.approx(2.0)
    recent.add(0.5, 0.125)
    assert recent.ratio == pytest.approx(1.0 / 0.625)


def test_delay_without_a_round_counts_as_time_taken() -> None:
    recent = RecentRounds(seconds=1.0)
    for _ in range(7):
        recent.add(0.125, 0.125)
    recent.add(0.125, 0.0)
    assert recent.ratio == pytest.approx(8 / 7)


def test_many_rounds_are_forgotten_and_the_quotient_stays() -> None:
    recent = RecentRounds(seconds=2.0)
    for _ in range(100_000):
        recent.add(0.002, 0.001)
    assert recent.ratio == pytest.approx(2.0)
    assert len(recent._taken) == len(recent._alone) <= 8192
    assert recent._taken[0] == 0.0
