"""Ratios of sums and their intervals."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specengine.lab.accept.bootstrap import draw_prompts, per_prompt, ratio, ratio_difference


def test_every_sample_has_as_many_prompts_of_each_set() -> None:
    strata = np.array([0, 1, 1, 0, 1])
    drawings = draw_prompts(strata, 200, seed=1)
    assert drawings.shape == (200, 5)
    assert (drawings[:, strata == 0].sum(1) == 2).all()
    assert (drawings[:, strata == 1].sum(1) == 3).all()
    assert (drawings == draw_prompts(strata, 200, seed=1)).all()
    assert (drawings != draw_prompts(strata, 200, seed=2)).any()


def test_a_ratio_is_of_sums_and_not_a_mean_of_ratios() -> None:
    drawings = np.array([[2.0, 0.0], [1.0, 1.0], [0.0, 2.0]])
    one = ratio(np.array([10, 30]), np.array([5, 10]), drawings)
    assert one.value == pytest.approx(40 / 15)
    # The samples are 20 / 10, 40 / 15 and 60 / 20; quantiles between them are linear.
    assert one.low == pytest.approx(2.0 + 0.05 * (40 / 15 - 2.0))
    assert one.high == pytest.approx(3.0 - 0.05 * (3.0 - 40 / 15))
    assert (one.count, one.prompts) == (15, 2)


def test_one_prompt_has_no_interval_and_none_has_no_value() -> None:
    drawings = draw_prompts(np.zeros(3, dtype=np.int64), 50, seed=0)
    one = ratio(np.array([0, 6, 0]), np.array([0, 3, 0]), drawings)
    assert one.value == 2.0
    assert math.isnan(one.low)
    assert math.isnan(one.high)
    nothing = ratio(np.zeros(3), np.zeros(3), drawings)
    assert math.isnan(nothing.value)
    assert nothing.count == 0


def test_samples_without_a_count_are_left_out_of_intervals() -> None:
    drawings = np.array([[3.0, 0.0, 0.0], [0.0, 2.0, 1.0], [0.0, 1.0, 2.0]])
    one = ratio(np.array([0, 4, 6]), np.array([0, 2, 2]), drawings)
    assert 2.0 < one.low < one.high < 3.0


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=2, max_size=12))
def test_a_constant_shift_between_paired_settings_has_no_width(
    prompts: list[tuple[int, int]],
) -> None:
    above, below = (np.array(column) for column in zip(*prompts, strict=True))
    drawings = draw_prompts(np.zeros(len(prompts), dtype=np.int64), 100, seed=0)
    one = ratio_difference((above + 2 * below, below), (above, below), drawings)
    assert one.value == pytest.approx(2.0)
    assert one.low == pytest.approx(2.0)
    assert one.high == pytest.approx(2.0)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=2, max_size=20),
    st.integers(0, 5),
)
def test_intervals_lie_within_the_prompts_own_ratios(
    prompts: list[tuple[int, int]], seed: int
) -> None:
    above, below = (np.array(column) for column in zip(*prompts, strict=True))
    drawings = draw_prompts(np.zeros(len(prompts), dtype=np.int64), 200, seed)
    one = ratio(above, below, drawings)
    each = above / below
    assert each.min() - 1e-9 <= one.low <= one.high <= each.max() + 1e-9
    assert each.min() - 1e-9 <= one.value <= each.max() + 1e-9


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    generator = np.random.default_rng(0)
    held = 0
    for seed in range(200):
        rounds = generator.integers(20, 60, size=60)
        chances = generator.beta(8, 4, size=60)  # of mean 2/3, a different one each prompt
        stood = generator.binomial(rounds, chances)
        one = ratio(stood, rounds, draw_prompts(np.zeros(60, dtype=np.int64), 300, seed))
        held += one.low <= 2 / 3 <= one.high
    assert 178 <= held <= 199  # 190 expected


def test_sums_by_prompt() -> None:
    sums = per_prompt(np.array([True, False, True, True]), np.array([2, 0, 2, 0]), 4)
    assert sums.tolist() == [1.0, 0.0, 2.0, 0.0]
