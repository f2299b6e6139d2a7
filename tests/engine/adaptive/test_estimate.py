"""Tokens a second by shape, and when an estimate is computed anew."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specengine.core.spec_stats import DraftShape
from specengine.engine.adaptive import estimate as module
from specengine.engine.adaptive.acceptance import Acceptance
from specengine.engine.adaptive.choose import MIN_ROUNDS
from specengine.engine.adaptive.costs import PLAIN
from specengine.engine.adaptive.estimate import (
    BUFFERED,
    Estimator,
    estimate,
    expected_tokens,
    smaller_sizes,
)
from specengine.engine.adaptive.state import DepthChooser
from tests.support.adaptive import DEPTH, World, chances, measured, seen

SECONDS = {DraftShape(depth): 1.0 + 0.1 * depth for depth in range(4)}
CHANCES = st.lists(st.floats(0, 1), min_size=3, max_size=3)
NEW = MIN_ROUNDS  # rounds of a shape that has only begun to stand


@given(CHANCES)
def test_expected_tokens_sum_the_chances_of_all_paths(found: list[float]) -> None:
    a, b, c = found
    expected = [1.0, 1 + a, 1 + a + a * b, 1 + a + a * b + a * b * c]
    assert expected_tokens(found) == pytest.approx(expected)


@given(CHANCES, CHANCES)
def test_better_acceptance_gives_no_depth_a_smaller_gain(
    one: list[float], two: list[float]
) -> None:
    low, high = [*map(min, one, two)], [*map(max, one, two)]
    poor, good = (estimate(4, {None: found}, 1.0, SECONDS) for found in (low, high))
    assert all(good.gain(shape) >= poor.gain(shape) - 1e-12 for shape in SECONDS)


@given(CHANCES, st.floats(0.0, 3.0))
def test_dearer_drafts_are_never_chosen_deeper(found: list[float], dearer: float) -> None:
    costs = {shape: cost + dearer * shape.num_steps for shape, cost in SECONDS.items()}
    cheap, dear = (estimate(1, {None: found}, 1.0, one).best for one in (SECONDS, costs))
    assert dear.num_steps <= cheap.num_steps


def test_of_equal_shapes_the_shallowest_is_the_best() -> None:
    assert estimate(1, {None: [0.0] * 3}, 1.0, dict.fromkeys(SECONDS, 1.0)).best == PLAIN


def test_drafts_of_a_quarter_of_the_requests_yield_a_quarter() -> None:
    found = estimate(8, {None: [1.0] * 3}, 0.25, SECONDS)
    assert list(found.tokens.values()) == [1.0, 1.25, 1.5, 1.75]
    assert found.gain(DraftShape(3)) == pytest.approx(1.75 / 1.3)


def test_in_a_graph_a_request_at_its_end_lowers_tokens_and_not_seconds() -> None:
    """In a graph all requests are as deep as the deepest."""
    tokens = []
    for coverage in (1.0, 0.9):
        steps = DepthChooser(range(DEPTH + 1), measured(), pads=True)
        World([0.8] * DEPTH, coverage=coverage, is_timed=False).run(steps, 16, 300)
        found = steps.estimator.of(16)
        assert found is not None
        assert found.seconds[DraftShape(DEPTH)] == measured().of(16, DEPTH)
        tokens.append(found.tokens[DraftShape(DEPTH)])
    assert tokens[1] < tokens[0]


@pytest.mark.parametrize(
    ("steps", "whole", "sizes"),
    [
        ([0, 1, 2, 3], [1, 5, 16, 16], {1: [2], 2: [4], 3: [4, 8]}),
        ([0, 1, 2, 3], [1, 3, 7, 8], {1: [2], 2: [3], 3: [4]}),
        ([0, 1], [1, 2], {}),
        ([0, 5], [1, 1, 1, 1, 1, 6], {}),
    ],
)
def test_smaller_sizes_are_halves_and_quarters_that_hold_a_full_path(
    steps: list[int], whole: list[int], sizes: dict[int, list[int]]
) -> None:
    assert smaller_sizes(steps, whole.__getitem__) == sizes


def settled() -> DepthChooser:
    """The deepest drafts have stood for a while; no round waits to be learned from."""
    steps = DepthChooser(range(DEPTH + 1), measured())
    for _ in range(NEW + 1):
        play(steps, DEPTH)
    assert steps.kept(1) is not None
    steps.estimator.flush()
    return steps


def play(steps: DepthChooser, accepted: int) -> int:
    """The depth of a round in which so many drafts were accepted, or all."""
    depth = steps.choose(1).num_steps
    steps.observe(seen(depth, [depth], [min(depth, accepted)]))
    return depth


def test_rounds_of_a_new_shape_are_learned_from_at_once() -> None:
    steps = DepthChooser(range(DEPTH + 1), measured())
    for _ in range(NEW):
        before = chances(steps.acceptance)
        play(steps, DEPTH)
        assert chances(steps.acceptance) != before


def test_rounds_of_the_standing_shape_are_learned_from_a_few_at_a_time() -> None:
    steps, changes = settled(), []
    for _ in range(3 * BUFFERED):
        before = chances(steps.acceptance)
        assert play(steps, 0) == DEPTH
        changes.append(chances(steps.acceptance) != before)
    assert changes == 3 * [*[False] * (BUFFERED - 1), True]


def test_waiting_rounds_are_learned_from_before_one_of_another_shape() -> None:
    """The order counts: the last outcome of a position weighs most."""
    steps, known = settled(), settled()
    for one in (steps, known):
        play(one, 0)
        one.observe(seen(1, [1], [1]))
    known.estimator.flush()
    assert chances(steps.acceptance) == chances(known.acceptance)


def test_whole_trees_are_not_merged_with_trees_that_were_cut() -> None:
    """A graph of whole trees runs where there is none of the chosen size. Merged with those, cut
    trees would seem to fail where only a larger tree goes on."""
    whole = seen(3, [15], [3], num_nodes=5, path_ranks=[[1, 2, 9]], limits=[3])
    cut = seen(3, [4], [2], num_nodes=5, path_ranks=[[1, 2]], limits=[3])
    found = []
    for one_by_one in (False, True):
        acceptance, shapes = Acceptance(3, [5]), [PLAIN, DraftShape(3, 5), DraftShape(3)]
        estimator = Estimator(shapes, measured(), acceptance, None, True)
        for number in range(400):
            estimator.buffer(cut if number % 4 else whole)
            if one_by_one:
                estimator.flush()
        estimator.flush()
        found.append(chances(acceptance)[2])
    assert found[0] == pytest.approx(found[1], abs=0.02)
    assert found[1] > 0.9


def test_failing_drafts_are_given_up_as_soon_with_merged_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given_up = []
    for rounds in (1, BUFFERED):
        monkeypatch.setattr(module, "BUFFERED", rounds)
        steps = settled()
        given_up.append([play(steps, 0) for _ in range(400)].index(0))
    assert abs(given_up[1] - given_up[0]) <= BUFFERED


def test_reading_the_current_choice_changes_nothing() -> None:
    """Another thread reads it for the metrics."""
    steps = settled()
    play(steps, 0)
    steps.estimator.costs_changed()
    before = {name: repr(value) for name, value in vars(steps.estimator).items()}
    assert steps.current is not None
    assert {name: repr(value) for name, value in vars(steps.estimator).items()} == before


def test_a_resolved_choice_counts_rounds_that_waited() -> None:
    steps = settled()
    stood = steps.kept(1)
    assert stood is not None
    before = steps.resolved(stood).expected_gain
    play(steps, 0)
    assert steps.resolved(stood).expected_gain != before
