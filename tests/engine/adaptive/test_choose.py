"""The choice of depth in simulated rounds: it converges, follows changes and says why."""

from __future__ import annotations

from statistics import mode

import pytest

from specengine.core.spec_stats import DepthChoice, DraftShape
from specengine.engine.adaptive.costs import ContextCost, StepCosts
from specengine.engine.adaptive.state import DepthChooser
from tests.support.adaptive import (
    DEPTH,
    SIZES,
    TreeWorld,
    World,
    changes,
    measured,
    measured_trees,
    mostly,
    rates,
    seen,
    tree_cost,
)

SETTLED_AFTER = 150  # rounds
USELESS, POOR, FAIR, GOOD = [0.0] * DEPTH, [0.1] * DEPTH, [0.5] * DEPTH, [0.9, 0.8, 0.8, 0.7]
FEW, FIRST_ONLY = [0.2, 0.1, 0.1, 0.1], [0.9, 0.05, 0.05, 0.05]
TREE = [0.55, 0.2, 0.1]  # chances of the children of a node
BOTH = pytest.mark.parametrize("is_timed", [False, True], ids=["from a table", "learned"])


def adaptive(is_timed: bool) -> DepthChooser:
    """Costs are learned from the rounds, or come from a table."""
    return DepthChooser(range(DEPTH + 1), None if is_timed else measured())


def tree_steps(is_timed: bool = False) -> DepthChooser:
    costs = None if is_timed else measured_trees()
    return DepthChooser(range(DEPTH + 1), costs, sizes=SIZES)


@BOTH
@pytest.mark.parametrize("batch_size", [1, 16, 64])
@pytest.mark.parametrize("chances", [USELESS, POOR, FAIR, GOOD, FIRST_ONLY])
def test_the_choice_converges_to_a_depth_near_the_best(
    chances: list[float], batch_size: int, is_timed: bool
) -> None:
    world = World(chances, is_timed=is_timed, noise=0.02)
    chosen = world.run(adaptive(is_timed), batch_size, SETTLED_AFTER + 100)
    found = rates(chances, batch_size)
    assert found[mostly(chosen[SETTLED_AFTER:])] > 0.95 * max(found)


@BOTH
@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize(
    ("chances", "batch_size"), [(USELESS, 1), (USELESS, 32), (POOR, 64), (GOOD, 256)]
)
def test_useless_drafts_cost_at_most_two_percent_and_are_tried_again(
    chances: list[float], batch_size: int, noise: float, is_timed: bool
) -> None:
    world = World(chances, is_timed=is_timed, noise=noise)
    chosen = world.run(adaptive(is_timed), batch_size, 3000 if batch_size == 1 else 1500)
    assert world.seconds < 1.02 * world.plain_seconds
    assert mostly(chosen) == 0
    assert max(chosen[SETTLED_AFTER:]) > 0


@BOTH
@pytest.mark.parametrize(
    ("before", "after", "rounds", "most"),
    [(USELESS, GOOD, 800, 0), (FIRST_ONLY, [0.9] * DEPTH, 1200, 2)],
    ids=["at all", "at depth"],
)
def test_acceptance_that_rises_is_noticed(
    before: list[float], after: list[float], rounds: int, most: int, is_timed: bool
) -> None:
    world, steps = World(before, is_timed=is_timed, noise=0.02), adaptive(is_timed)
    assert mostly(world.run(steps, 4, 600)[-100:]) <= most
    world.chances = after
    found = mostly(world.run(steps, 4, rounds)[-100:])
    assert rates(after, 4)[found] > 0.95 * max(rates(after, 4))


@BOTH
def test_noise_changes_the_standing_depth_rarely(is_timed: bool) -> None:
    world, steps = World(FAIR, is_timed=is_timed, noise=0.05), adaptive(is_timed)
    world.run(steps, 8, SETTLED_AFTER)
    assert changes(lambda: world.run(steps, 8, 1), steps) <= 800 // 80


def test_deep_drafts_that_become_dear_are_given_up() -> None:
    world, steps = World(GOOD, noise=0.02), adaptive(is_timed=True)
    assert mostly(world.run(steps, 1, 300)[-100:]) >= 3
    world.cost = lambda batch_size, num_steps: 1.0 + 2.0 * num_steps
    assert mostly(world.run(steps, 1, 1500)[-100:]) == 0


def test_a_machine_that_slows_down_changes_no_choice() -> None:
    world, steps = World(GOOD, noise=0.02), adaptive(is_timed=True)
    world.run(steps, 1, 300)
    before = world.cost
    world.cost = lambda batch_size, num_steps: 2.0 * before(batch_size, num_steps)
    assert sum(depth >= 3 for depth in world.run(steps, 1, 600)) > 500


@pytest.mark.parametrize("coverage", [0.0, 0.2])
def test_requests_without_drafts_do_not_change_the_depth(coverage: float) -> None:
    world = World(GOOD, coverage=coverage, noise=0.02)
    assert mostly(world.run(adaptive(is_timed=True), 1, 400)[-200:]) >= 3
    assert world.seconds < 1.02 * world.plain_seconds


def test_each_batch_size_has_its_own_choice() -> None:
    world, steps = World(GOOD, is_timed=False), adaptive(is_timed=False)
    for _ in range(20):
        world.run(steps, 1, 10)
        world.run(steps, 256, 10)
    assert mostly(world.run(steps, 1, 30)) >= 3
    assert mostly(world.run(steps, 256, 30)) == 0


def test_rounds_may_be_chosen_before_the_last_is_observed() -> None:
    world, steps = World(USELESS), adaptive(is_timed=False)
    chosen = [steps.choose(8).num_steps]
    for _ in range(1000):
        chosen.append(steps.choose(8).num_steps)
        steps.observe(seen(chosen[-2], [chosen[-2]] * 8, [0] * 8))
    extra = sum(world.cost(8, depth) - world.cost(8, 0) for depth in chosen)
    assert extra < 0.02 * len(chosen) * world.cost(8, 0)


def test_drafts_that_lose_in_short_contexts_pay_in_long_ones() -> None:
    """A long context costs every round the same, with drafts or without."""
    more = ContextCost(100, {64: {0: 2.0, 4: 2.2}})
    steps, found = DepthChooser(range(5), StepCosts(measured().seconds, context_cost=more)), []
    for length in (10, 1000, 10):
        steps.set_context_length(64, length)
        found.append(mode(World(FEW, is_timed=False).run(steps, 64, 200)[100:]))
    assert found == [0, 1, 0]


def test_a_context_by_which_drafts_come_to_pay_is_reported_once() -> None:
    """It resumes a paused drafter."""
    more = ContextCost(100, {64: {0: 2.0, 4: 2.2}})
    steps = DepthChooser(range(5), StepCosts(measured().seconds, context_cost=more))
    World(FEW, is_timed=False).run(steps, 64, 200)
    found = [steps.set_context_length(64, length) for length in (10, 1000, 1010, 10)]
    assert found == [False, True, False, False]


def test_the_reason_names_depth_size_gain_and_acceptance() -> None:
    steps = DepthChooser([1, 2], measured())
    assert steps.current is None
    assert steps.choose(64).reason.startswith("batch 64: K=0, the best draft K=1 would be 0.")
    steps = DepthChooser([1, 2], measured())
    World([0.9, 0.8], is_timed=False).run(steps, 1, 200)
    assert steps.current is not None
    assert steps.current.num_steps == 2
    assert steps.current.expected_gain == pytest.approx(2.3, abs=0.2)
    assert steps.current.reason.startswith("batch 1: K=2, 2.")
    assert "x of none; acceptance 0." in steps.current.reason
    steps = tree_steps()
    TreeWorld(TREE, tree_cost).run(steps, 16, 300)
    found = steps.current
    assert found is not None
    assert found.num_nodes is not None
    assert found.reason.startswith(f"batch 16: {found.shape}, ")
    assert str(found.shape) == f"K={found.num_steps} with {found.num_nodes} nodes"


def test_the_standing_choice_is_resolved_with_the_figures_of_now() -> None:
    steps = DepthChooser([1, 2], measured())
    World([0.9, 0.8], is_timed=False).run(steps, 1, 200)
    standing = steps.kept(1)
    assert standing is not None
    assert steps.resolved(standing) == steps.current != standing
    tried = DepthChoice(1, "K=1 tried for a round", None)
    assert steps.resolved(tried) is tried, "it never stood"
    steps.choose(64)
    assert steps.resolved(standing) is standing, "of another batch size"


def test_plain_decoding_is_always_a_choice_and_a_decision_has_one_shape() -> None:
    assert DepthChooser([3]).steps == [0, 3]
    decision = DepthChoice(3, "why", None, 8)
    assert decision.shape is decision.shape
    assert decision.shape == DraftShape(3, 8)
