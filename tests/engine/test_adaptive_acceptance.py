"""How often drafts stand, and what a depth promises."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specengine.engine.adaptive.acceptance import Acceptance, PositionShares
from specengine.engine.adaptive.costs import DraftShape, PLAIN
from specengine.engine.adaptive.estimate import estimate, expected_tokens

PRIOR = pytest.approx(0.7)
SECONDS = {DraftShape(0): 1.0, DraftShape(1): 1.1, DraftShape(2): 1.2, DraftShape(3): 1.3}
CHANCES = st.lists(st.floats(0, 1), min_size=3, max_size=3)


def of_rounds(rounds: list[tuple[list[int], list[int]]], depth: int = 3) -> list[float]:
    acceptance = Acceptance(depth)
    for drafted, accepted in rounds:
        acceptance.observe(drafted, accepted)
    return acceptance.chances()


def test_first_rounds_are_not_trusted_blindly() -> None:
    assert of_rounds([]) == [PRIOR] * 3
    assert 0.5 < of_rounds([([3], [0])])[0] < 0.7
    assert 0.7 < of_rounds([([3], [1])])[0] < 0.8


def test_a_place_is_judged_where_it_was_reached() -> None:
    """Half stand at the first place, of those all at the second, of those none at the third."""
    chances = of_rounds([([3, 3], [0, 2])] * 300)
    assert chances == pytest.approx([0.5, 1.0, 0.0], abs=0.01)


def test_drafts_that_end_say_nothing_of_deeper_places() -> None:
    """Which are then expected to be like the one before them."""
    assert of_rounds([([1, 0], [1, 0])] * 500) == pytest.approx([1.0] * 3, abs=0.01)
    assert of_rounds([([1, 0], [0, 0])] * 500) == pytest.approx([0.0] * 3, abs=0.01)


def test_the_past_is_forgotten() -> None:
    before, after = ([1], [1]), ([1], [0])
    assert of_rounds([before] * 2000 + [after] * 200)[0] < 0.4
    assert of_rounds([before] * 2000 + [after] * 800)[0] < 0.03


def test_a_few_large_rounds_are_not_the_whole_memory() -> None:
    before, after = ([1] * 200, [1] * 200), ([1] * 200, [0] * 200)
    assert of_rounds([before] * 50 + [after])[0] > 0.9


def test_coverage_is_the_share_of_requests_that_draft() -> None:
    acceptance = Acceptance(2)
    assert acceptance.coverage == 1.0
    for _ in range(20):
        acceptance.observe([2, 1], [1, 0])
    assert acceptance.coverage == 1.0
    for _ in range(500):
        acceptance.observe([2, 0, 0, 0], [0, 0, 0, 0])
    assert acceptance.coverage == pytest.approx(0.25, abs=0.01)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=20))
def test_requests_count_place_by_place(round_of: list[tuple[int, int]]) -> None:
    """Tried where those above it stood, as deep as there are places."""
    pairs = [(levels, min(levels, kept)) for levels, kept in round_of]
    expected = PositionShares(3, 0.7)
    for place in range(3):
        reached = [kept for levels, kept in pairs if levels > place and kept >= place]
        expected.add(place, len(reached), sum(kept > place for kept in reached))
    drafted, accepted = zip(*pairs, strict=True)
    assert of_rounds([([*drafted], [*accepted])]) == expected.chances()


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3)), min_size=1, max_size=40))
def test_chances_are_chances(rounds: list[tuple[int, int]]) -> None:
    pairs = [([levels], [min(levels, kept)]) for levels, kept in rounds]
    assert all(0.0 <= chance <= 1.0 for chance in of_rounds(pairs))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(0, 39), st.integers(0, 39))
def test_more_accepted_is_a_better_chance_of_the_first_place(
    accepted: list[int], one: int, other: int
) -> None:
    better = list(accepted)
    for place in (one, other):
        better[place % len(better)] = 3
    low = of_rounds([([3], [kept]) for kept in accepted])
    high = of_rounds([([3], [kept]) for kept in better])
    assert high[0] >= low[0] - 1e-12


@given(CHANCES)
def test_expected_tokens(chances: list[float]) -> None:
    a, b, c = chances
    assert expected_tokens(chances) == pytest.approx(
        [1.0, 1 + a, 1 + a + a * b, 1 + a + a * b + a * b * c]
    )


@given(CHANCES, CHANCES)
def test_better_acceptance_promises_no_less_of_any_depth(
    one: list[float], other: list[float]
) -> None:
    low = [min(pair) for pair in zip(one, other, strict=True)]
    high = [max(pair) for pair in zip(one, other, strict=True)]
    poor, good = (estimate(4, {None: one}, 1.0, SECONDS) for one in (low, high))
    assert all(good.gain(shape) >= poor.gain(shape) - 1e-12 for shape in SECONDS)


@given(CHANCES, st.floats(0.0, 3.0))
def test_dearer_drafts_are_never_deeper(chances: list[float], dearer: float) -> None:
    cheap = estimate(1, {None: chances}, 1.0, SECONDS)
    costs = {shape: cost + dearer * shape.num_steps for shape, cost in SECONDS.items()}
    dear = estimate(1, {None: chances}, 1.0, costs)
    assert dear.best.num_steps <= cheap.best.num_steps


def test_useless_drafts_are_not_worth_even_nothing() -> None:
    """Of equals the shallowest."""
    assert estimate(1, {None: [0.0] * 3}, 1.0, dict.fromkeys(SECONDS, 1.0)).best == PLAIN


def test_few_drafts_weigh_little() -> None:
    view = estimate(8, {None: [1.0] * 3}, 0.25, SECONDS)
    assert list(view.tokens.values()) == [1.0, 1.25, 1.5, 1.75]
    assert view.gain(DraftShape(3)) == pytest.approx(1.75 / 1.3)
