"""What is learned of a few rounds at once is what would be learned of each."""

from __future__ import annotations

import random

import pytest

from specengine.engine.adaptive import heard
from specengine.engine.adaptive.acceptance import Acceptance, RoundObservation
from specengine.engine.adaptive.choose import Policy
from specengine.engine.adaptive.costs import DraftShape
from specengine.engine.adaptive.estimate import Estimator
from specengine.engine.adaptive.state import AdaptiveSteps
# TODO Heard
# TODO ROUNDS
from tests.engine.adaptive_world import DEPTH, measured

NEW = Policy().min_rounds  # rounds of a shape that has only begun to stand


def settled() -> AdaptiveSteps:
    """On the deepest drafts, for a while."""
    steps = AdaptiveSteps(range(DEPTH + 1), measured())
    for _ in range(NEW + 1):
        play(steps, DEPTH)
    assert steps.standing(1) is not None
    steps.prospects.learn_heard()
    return steps


def play(steps: AdaptiveSteps, accepted: int) -> int:
    """The depth of a round in which so many drafts stood, or all there were."""
    depth = steps.choose(1).num_steps
    steps.observe(1, depth, [depth], [min(depth, accepted)])
    return depth


@pytest.mark.parametrize("requests", [1, 8, 64])
@pytest.mark.parametrize("sizes", [[], [2, 4]])
def test_a_few_rounds_at_once_weigh_as_much_as_one_by_one(sizes: list[int], requests: int) -> None:
    """And what was before them is forgotten as fast."""
    draw, depth = random.Random(0), 3
    each, together = Acceptance(depth, sizes), Acceptance(depth, sizes)
    for number in range(60):
        few = Heard((DraftShape(depth), True, None))
        chance = 0.95 if number < 40 else 0.4
        for _ in range(ROUNDS):
            accepted = [
                next((place for place in range(depth) if draw.random() > chance), depth)
                for _ in range(requests)
            ]
            ranks = [sorted(draw.sample(range(1, 8), count)) for count in accepted]
            drafted, limits = [7] * requests, [depth] * requests
            each.observe(depth, RoundObservation(drafted, accepted, ranks, None, limits))
            is_enough = few.add(drafted, accepted, limits, ranks)
        assert is_enough
        together.observe(depth, few.outcomes)
        for size in (*sizes, None):
            assert together.chances(size) == pytest.approx(each.chances(size), abs=0.03)


def test_rounds_of_whole_trees_do_not_speak_for_those_that_were_cut() -> None:
    """A graph of whole ones flies where there is none of such a size: told together, the cut ones
    would seem to have failed where only a larger tree goes on."""
    whole, cut = ([15], [3], [3], [[1, 2, 9]]), ([4], [2], [3], [[1, 2]])
    chances = []
    for each in (False, True):
        acceptance = Acceptance(3, [5])
        prospects = Estimator([DraftShape(0), DraftShape(3, 5), DraftShape(3)], measured(), acceptance, None, True)
        for number in range(400):
            drafted, accepted, limits, ranks = whole if number % 4 == 0 else cut
            prospects.hear(DraftShape(3, 5), drafted, accepted, limits, ranks)
            if each:
                prospects.learn_heard()
        prospects.learn_heard()
        chances.append(acceptance.chances()[2])
    assert chances[0] == pytest.approx(chances[1], abs=0.02)
    assert chances[1] > 0.9


def test_who_looks_on_changes_nothing() -> None:
    """Counters are read from another thread."""
    steps = settled()
    play(steps, 0)
    before = {name: repr(value) for name, value in vars(steps.prospects).items()}
    steps.prospects.forget_costs()
    before |= {"_view": "None", "_fixed": "{}"}
    assert steps.current is not None
    assert {name: repr(value) for name, value in vars(steps.prospects).items()} == before


def test_rounds_that_stand_are_learned_from_before_long() -> None:
    steps = settled()
    before = steps.acceptance.chances()
    changes = []
    for _ in range(3 * ROUNDS):
        assert play(steps, 0) == DEPTH
        changes.append(steps.acceptance.chances() != before)
        before = steps.acceptance.chances()
    assert changes == 3 * [*[False] * (ROUNDS - 1), True]


def test_what_has_only_begun_to_stand_is_learned_from_at_once() -> None:
    steps = AdaptiveSteps(range(DEPTH + 1), measured())
    for _ in range(NEW):
        before = steps.acceptance.chances()
        play(steps, DEPTH)
        assert steps.acceptance.chances() != before


def test_another_shape_is_learned_from_behind_those_before_it() -> None:
    """As the rounds were: of one place the last outcome weighs most."""
    steps, known = settled(), settled()
    for one in (steps, known):
        play(one, 0)
        one.observe(1, 1, [1], [1])
    known.prospects.learn_heard()
    assert steps.acceptance.chances() == known.acceptance.chances()


def test_who_ends_is_told_of_all_rounds() -> None:
    steps = settled()
    stood = steps.standing(1)
    assert stood is not None
    before = steps.told(stood).expected_gain
    play(steps, 0)
    assert steps.told(stood).expected_gain != before


def test_drafts_that_fail_are_given_up_as_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when each round is learned from by itself."""
    given_up = []
    for rounds in (1, ROUNDS):
        monkeypatch.setattr(heard, "ROUNDS", rounds)
        steps = settled()
        given_up.append([play(steps, 0) for _ in range(400)].index(0))
    assert abs(given_up[1] - given_up[0]) <= ROUNDS
