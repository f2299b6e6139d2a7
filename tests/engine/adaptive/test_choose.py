"""The choice in simulated rounds: it converges, loses little on probes, and follows changes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from statistics import mode

import pytest

from specengine.engine.adaptive.choose import PROBE_SHARE, Decision, DrafterPause, ProbeBudget
from specengine.engine.adaptive.costs import PLAIN, ContextCost, DraftShape, RunningCosts, StepCosts
from specengine.engine.adaptive.estimate import HostSeconds
from specengine.engine.adaptive.state import AdaptiveSteps
from tests.support.adaptive import (
    DEPTH,
    SIZES,
    TreeWorld,
    World,
    best_depth,
    measured,
    measured_trees,
    mostly,
    rates,
    seen,
    tree_cost,
)

SETTLED_AFTER = 150  # rounds
USELESS, POOR, FAIR, GOOD = [0.0] * DEPTH, [0.1] * DEPTH, [0.5] * DEPTH, [0.9, 0.8, 0.8, 0.7]
EVEN, FEW, FIRST_ONLY = [0.6] * DEPTH, [0.2, 0.1, 0.1, 0.1], [0.9, 0.05, 0.05, 0.05]
TREE = [0.55, 0.2, 0.1]  # chances of the children of a node
WHOLE, SMALL = DraftShape(DEPTH), DraftShape(DEPTH, 5)
BOTH = pytest.mark.parametrize("is_timed", [False, True], ids=["from a table", "learned"])


def adaptive(is_timed: bool) -> AdaptiveSteps:
    """Costs are learned from the rounds, or come from a table."""
    return AdaptiveSteps(range(DEPTH + 1), None if is_timed else measured())


def tree_steps(is_timed: bool = False) -> AdaptiveSteps:
    costs = None if is_timed else measured_trees()
    return AdaptiveSteps(range(DEPTH + 1), costs, sizes=SIZES)


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


def changes(run: Callable[[], object], steps: AdaptiveSteps) -> int:
    """Of the standing shape, in 800 rounds."""
    stood = []
    for _ in range(800):
        run()
        assert steps.current is not None
        stood.append(steps.current.shape)
    return sum(one != other for one, other in pairwise(stood))


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
    steps, found = AdaptiveSteps(range(5), StepCosts(measured().seconds, context_cost=more)), []
    for length in (10, 1000, 10):
        steps.set_context_length(64, length)
        found.append(mode(World(FEW, is_timed=False).run(steps, 64, 200)[100:]))
    assert found == [0, 1, 0]


def test_a_context_by_which_drafts_come_to_pay_is_reported_once() -> None:
    """It resumes a paused drafter."""
    more = ContextCost(100, {64: {0: 2.0, 4: 2.2}})
    steps = AdaptiveSteps(range(5), StepCosts(measured().seconds, context_cost=more))
    World(FEW, is_timed=False).run(steps, 64, 200)
    found = [steps.set_context_length(64, length) for length in (10, 1000, 1010, 10)]
    assert found == [False, True, False, False]


@BOTH
def test_the_smaller_tree_is_chosen_where_nodes_cost(is_timed: bool) -> None:
    """And the whole one at batch size 1, where they do not."""
    world = TreeWorld(TREE, tree_cost, is_timed=is_timed)
    costs = None if is_timed else measured_trees()
    steps = AdaptiveSteps([0, DEPTH], costs, sizes={DEPTH: SIZES[DEPTH]})
    assert mostly(world.run(steps, 1, 300)[-100:]) == WHOLE
    assert mostly(world.run(steps, 8, 500)[-150:]) == DraftShape(DEPTH, 8)
    assert mostly(world.run(steps, 16, 500)[-150:]) == SMALL
    assert mostly(world.run(steps, 1, 100)[-50:]) == WHOLE


@BOTH
@pytest.mark.parametrize("batch_size", [1, 4, 16, 64])
def test_of_all_shapes_one_near_the_best_is_found(batch_size: int, is_timed: bool) -> None:
    world, steps = TreeWorld(TREE, tree_cost, 0.02, is_timed), tree_steps(is_timed)
    found = mostly(world.run(steps, batch_size, 600)[-150:])
    all_rates = {shape: world.rate(shape, batch_size) for shape in steps.shapes}
    assert all_rates[found] > 0.94 * max(all_rates.values())


@BOTH
def test_sizes_are_not_chosen_without_ranks(is_timed: bool) -> None:
    world = TreeWorld(TREE, tree_cost, is_timed=is_timed, has_ranks=False)
    steps = tree_steps(is_timed)
    for batch_size in (1, 16, 64):
        assert {one.num_nodes for one in world.run(steps, batch_size, 300)} == {None}


def test_sizes_are_not_chosen_if_a_table_lacks_them() -> None:
    costs = StepCosts(measured_trees().seconds)
    steps = AdaptiveSteps(range(DEPTH + 1), costs, sizes=SIZES)
    assert {one.num_nodes for one in TreeWorld(TREE, tree_cost).run(steps, 16, 300)} == {None}


def test_noise_changes_the_standing_size_rarely() -> None:
    world, steps = TreeWorld(TREE, tree_cost, noise=0.05, is_timed=True), tree_steps(True)
    world.run(steps, 8, 300)
    assert changes(lambda: world.run(steps, 8, 1), steps) <= 800 // 80


@BOTH
def test_acceptance_of_larger_trees_that_rises_is_noticed(is_timed: bool) -> None:
    """Rounds of small trees do not show it: larger ones are probed."""
    cost = {SMALL: 1.2, DraftShape(DEPTH, 8): 1.22, WHOLE: 1.25, PLAIN: 1.0}
    world = TreeWorld([0.8], lambda _, shape: cost.get(shape, 9.0), is_timed=is_timed)
    costs = None if is_timed else measured_trees(world.cost)
    steps = AdaptiveSteps([0, DEPTH], costs, sizes={DEPTH: [5, 8]})
    assert mostly(world.run(steps, 4, 600)[-100:]) == SMALL
    world.chances = [0.45, 0.45]
    assert mostly(world.run(steps, 4, 2000)[-100:]) == WHOLE


def test_probes_of_larger_trees_cost_less_than_two_percent() -> None:
    world, steps = TreeWorld([0.8], tree_cost), tree_steps()
    world.run(steps, 16, 200)
    chosen = world.run(steps, 16, 2000)
    standing = mostly(chosen)
    tokens = {shape: world.tokens(shape) for shape in {*chosen}}
    spent = sum(tree_cost(16, shape) for shape in chosen)
    usual = tokens[standing] / tree_cost(16, standing)
    assert sum(tokens[shape] for shape in chosen) / spent > 0.98 * usual


def flat(seconds: float) -> Callable[[int, int], float]:
    return lambda batch_size, depth: seconds


def host_world(host: Callable[[int, int], float], is_timed: bool = False) -> World:
    return World(EVEN, host=host, noise=0.02, is_timed=is_timed)


@pytest.mark.parametrize(
    ("host", "best"),
    [
        pytest.param(flat(0.5), best_depth(EVEN, 16), id="fast"),
        pytest.param(flat(9.0), DEPTH, id="slow at all depths"),
        pytest.param(lambda _, depth: 4.0 * (1 + depth), 0, id="slower with each draft"),
    ],
)
def test_the_best_depth_beside_a_host_is_found(
    host: Callable[[int, int], float], best: int
) -> None:
    world = host_world(host)
    steps = AdaptiveSteps(range(DEPTH + 1), measured(), host=HostSeconds())
    assert world.run(steps, 16, 1200)[-400:].count(best) > 380
    if best == 0:
        assert world.seconds < 1.08 * world.plain_seconds, "each depth is tried, and not for long"


@pytest.mark.parametrize("learned_slow", [False, True])
def test_load_on_the_host_that_comes_and_goes_changes_no_depth_for_good(
    learned_slow: bool,
) -> None:
    best, world, host = best_depth(EVEN, 16), host_world(flat(0.9), is_timed=True), HostSeconds()
    taught = [(PLAIN, 0.5), (WHOLE, 2.4)] if learned_slow else [(PLAIN, 0.5)]
    teach(host, taught)
    steps = AdaptiveSteps(range(DEPTH + 1), measured(), host=host)
    for seconds in (0.9, 2.4, 0.9, 2.4, 0.9):
        world.host = flat(seconds)
        chosen = world.run(steps, 16, 300)
    assert chosen[-200:].count(best) > 180


def teach(host: HostSeconds, seconds: Sequence[tuple[DraftShape, float]]) -> None:
    for shape, each in seconds:
        for _ in range(8):
            host.record(16, shape, each)


@pytest.mark.parametrize("slower", [1.5, 3.0])
def test_a_slow_start_of_the_host_does_not_count_against_drafts(slower: float) -> None:
    host = HostSeconds()
    teach(host, [(WHOLE, 9.0 * slower), (PLAIN, 9.0)])
    steps = AdaptiveSteps(range(DEPTH + 1), measured(), host=host)
    assert host_world(flat(9.0)).run(steps, 16, 4000)[-400:].count(DEPTH) > 380


def test_a_fast_host_changes_no_round() -> None:
    runs = []
    for host in (None, HostSeconds()):
        steps = AdaptiveSteps(range(DEPTH + 1), measured(), host=host)
        runs.append(host_world(flat(0.5)).run(steps, 16, 600))
    assert runs[0] == runs[1]


def test_the_reason_names_depth_size_gain_and_acceptance() -> None:
    steps = AdaptiveSteps([1, 2], measured())
    assert steps.current is None
    assert steps.choose(64).reason.startswith("batch 64: K=0, the best draft K=1 would be 0.")
    steps = AdaptiveSteps([1, 2], measured())
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
    steps = AdaptiveSteps([1, 2], measured())
    World([0.9, 0.8], is_timed=False).run(steps, 1, 200)
    standing = steps.standing(1)
    assert standing is not None
    assert steps.resolved(standing) == steps.current != standing
    tried = Decision(1, "K=1 tried for a round", None)
    assert steps.resolved(tried) is tried, "it never stood"
    steps.choose(64)
    assert steps.resolved(standing) is standing, "of another batch size"


def test_plain_decoding_is_always_a_choice_and_a_decision_has_one_shape() -> None:
    assert AdaptiveSteps([3]).steps == [0, 3]
    decision = Decision(3, "why", None, 8)
    assert decision.shape is decision.shape
    assert decision.shape == DraftShape(3, 8)


def test_costs_are_measured_first_without_a_table() -> None:
    steps = AdaptiveSteps([1, 2])
    first = steps.choose(3)
    assert (first.num_steps, first.expected_gain) == (2, None)
    assert first.reason == "batch 3: measuring the cost of K=2"
    assert steps.current is first
    assert [steps.choose(3).num_steps for _ in range(5)] == [2, 0, 0, 0, 0]
    assert steps.choose(3).reason == "batch 3: K=2, the cost of drafts is not known yet"


def test_plain_rounds_are_probed_in_a_row() -> None:
    """The first of them has nothing to overlap with: its time is not told."""
    steps, chosen = AdaptiveSteps([0, 3]), [3]
    for _ in range(600):
        depth = steps.choose(4).num_steps
        seconds = 5.0 if depth else 1.0 if chosen[-1] == 0 else None
        steps.observe(seen(depth, [depth] * 4, [2 if depth else 0] * 4, seconds=seconds))
        chosen.append(depth)
    assert chosen[-200:].count(0) > 190
    steps, chosen = AdaptiveSteps([0, 3]), []
    for _ in range(2000):
        depth = steps.choose(4).num_steps
        steps.observe(seen(depth, [depth] * 4, [min(depth, 2)] * 4, seconds=1.0))
        chosen.append(depth)
    assert {len([*run]) for depth, run in groupby(chosen[600:-4]) if depth == 0} == {4}


def run_by_hand(
    steps: AdaptiveSteps,
    batch_size: int,
    rounds: int,
    cost: Callable[[int, int], float | None],
    kept: Callable[[int], int],
) -> list[int]:
    """cost(place, depth): seconds of that round, most of them the host's where it drafts; None:
    not told. kept(depth): accepted drafts. Returns the depths."""
    chosen = []
    for place in range(rounds):
        depth = steps.choose(batch_size).num_steps
        seconds, levels = cost(place, depth), [depth] * batch_size
        drafting = 0.8 * (seconds or 0.0) if depth else 0.0
        more = {"seconds": seconds, "drafting_seconds": drafting}
        steps.observe(seen(depth, levels, [kept(depth)] * batch_size, **more))
        chosen.append(depth)
    return chosen


def in_debt(steps: AdaptiveSteps, batch_size: int) -> None:
    """As deep as it gets."""
    budget = steps._bucket(batch_size).budget
    budget.pay(1e9, 1.0, drafting_seconds=1e9)
    assert budget.saved == -16.0


def test_plain_rounds_that_were_slow_at_first_are_probed_again() -> None:
    """After a prefill the host comes late."""

    def cost(place: int, depth: int) -> float:
        return 11.0 * depth / 8 if depth else 1.6 if place < 8 else 1.0

    chosen = run_by_hand(AdaptiveSteps([0, 4, 8]), 256, 80, cost, lambda depth: 6 * depth // 8)
    assert set(chosen[60:]) == {0}


@pytest.mark.parametrize(
    ("lost_at", "most"), [(64, 1000), (256, 9000)], ids=["at another size", "at this"]
)
def test_debt_of_one_batch_size_forbids_no_probes_at_another(lost_at: int, most: int) -> None:
    steps = AdaptiveSteps([0, 4])
    for size in (64, 256):
        run_by_hand(steps, size, 60, lambda place, depth: 1.0 + depth / 8, lambda depth: 0)
    in_debt(steps, lost_at)
    chosen = run_by_hand(steps, 256, most, lambda place, depth: 1.0 + depth / 8, lambda depth: 4)
    first = next(place for place, depth in enumerate(chosen) if depth)
    assert (first > 1000) == (lost_at == 256)


@pytest.mark.parametrize("better", [0, 2])
def test_drafts_that_lose_end_whatever_debt_there_is(better: int) -> None:
    """For what is better, plain decoding or shallower drafts."""
    paid = {0: 1.0, 2: 1.6 if better else 9.0, 8: 2.0}
    steps = AdaptiveSteps([0, 2, 8])
    run_by_hand(steps, 4, 40, lambda place, depth: paid[depth], lambda depth: 6 if depth > 2 else 0)
    in_debt(steps, 4)
    paid[8] = 5.0
    kept = {0: 0, 2: 2 if better else 0, 8: 2}
    chosen = run_by_hand(steps, 4, 80, lambda place, depth: paid[depth], kept.__getitem__)
    assert chosen[0] == 8
    assert set(chosen[-20:]) == {better}


def test_deeper_drafts_are_probed_where_plain_rounds_are_not_timed() -> None:
    """Plain rounds beside a lookup drafter are not, where none follows another."""
    steps = AdaptiveSteps([0, 2, 8])

    def cost(place: int, depth: int) -> float | None:
        return 1.0 + 0.4 * depth if depth else 1.0 if place < 6 else None

    chosen = run_by_hand(steps, 4, 3000, cost, lambda depth: 1 if depth else 0)
    assert mostly(chosen) == 2
    assert chosen[200:].count(8) > 5


MODEL, LOOKUP = 3, 7  # steps


@dataclass
class HybridWorld:
    """A request at a time. In a share of the rounds it has a match, for which the model does not
    run."""

    match_share: float
    model: Sequence[float]  # acceptance by position
    level: float  # seconds of a level of the model's, beside 1 of the target's
    random: random.Random = field(default_factory=lambda: random.Random(0))

    def run(self, steps: AdaptiveSteps, rounds: int) -> list[int]:
        return [self._round(steps) for _ in range(rounds)]

    def _round(self, steps: AdaptiveSteps) -> int:
        depth, is_match = steps.choose(1).num_steps, self.random.random() < self.match_share
        levels = depth if is_match else min(depth, MODEL)
        fails = (not is_match and self.random.random() >= one for one in self.model[:levels])
        accepted = next((n for n, failed in enumerate(fails) if failed), levels)
        seconds = 1.0 + 0.01 * levels + (0.0 if is_match else self.level * levels)
        steps.observe(seen(depth, [levels], [accepted], seconds=seconds, from_lookup=[is_match]))
        return depth


@pytest.mark.parametrize(
    ("match_share", "model", "level", "expected"),
    [
        pytest.param(0.1, 0.7, 0.9, {0}, id="rare matches, and a model that loses"),
        pytest.param(0.3, 0.5, 0.3, {LOOKUP}, id="frequent matches"),
        pytest.param(0.02, 0.9, 0.05, {MODEL, LOOKUP}, id="rare matches, and a model that pays"),
    ],
)
def test_a_hybrid_weighs_both_sources(
    match_share: float, model: float, level: float, expected: set[int]
) -> None:
    """Accepted matches are deep and cheap, which rounds of the model are not."""
    found = set()
    for seed in range(6):
        world = HybridWorld(match_share, [model] * MODEL, level, random.Random(seed))
        steps = AdaptiveSteps([0, 1, 2, MODEL, LOOKUP], RunningCosts(), model_steps=MODEL)
        world.run(steps, 400)
        found.add(mostly(world.run(steps, 800)))
    assert found <= expected


ROUND = 2.0  # seconds


def saved(rounds: float = 0.0) -> ProbeBudget:
    budget = ProbeBudget()
    budget.earn(ROUND, round(rounds / PROBE_SHARE))
    return budget


def rounds_until(budget: ProbeBudget, loss: float, most: int = 10_000) -> int:
    for count in range(most):
        if budget.allows(loss, ROUND):
            return count
        budget.earn(ROUND)
    return most


def test_probes_may_lose_a_share_of_all_time() -> None:
    budget, lost = ProbeBudget(), 0.0
    for _ in range(5000):
        if budget.allows(0.7 * ROUND, ROUND):
            budget.pay(0.7 * ROUND, ROUND)
            lost += 0.7 * ROUND
        budget.earn(ROUND)
    assert 0.9 * PROBE_SHARE < lost / (5000 * ROUND) <= PROBE_SHARE


@pytest.mark.parametrize(
    ("loss", "drafting", "charged"), [(7.0, 6.5, 7.0), (500.0, 0.0, 2.0), (500.0, 0.5, 2.5)]
)
def test_a_probes_drafting_is_charged_in_full_and_its_delay_up_to_two_rounds(
    loss: float, drafting: float, charged: float
) -> None:
    budget = saved()
    budget.pay(loss * ROUND, ROUND, drafting_seconds=drafting * ROUND)
    assert budget.saved == pytest.approx(-charged * ROUND)
    assert rounds_until(budget, 0.0) == pytest.approx(charged / PROBE_SHARE, abs=1)


def test_a_probe_that_gains_pays_for_the_next() -> None:
    budget = saved()
    budget.pay(-0.5 * ROUND, ROUND, drafting_seconds=3 * ROUND)
    assert budget.allows(0.5 * ROUND, ROUND)


def test_debt_and_savings_are_bounded() -> None:
    """Debt also where rounds become shorter."""
    budget = saved()
    for _ in range(3):
        budget.pay(1000 * ROUND, ROUND, drafting_seconds=1000 * ROUND)
    most = rounds_until(budget, 1000 * ROUND)
    assert 2000 < most < 4000
    budget.pay(1000 * ROUND, 50 * ROUND, drafting_seconds=1000 * ROUND)
    assert rounds_until(budget, 1000 * ROUND) <= most + 1
    budget = saved(rounds=50)
    budget.pay(3 * ROUND, ROUND, drafting_seconds=3 * ROUND)
    assert not budget.allows(0.1 * ROUND, ROUND)


@pytest.mark.parametrize(
    ("standing", "paused"),
    [
        pytest.param([None, 1, 3, None, 2], [False] * 5, id="active while drafts may stand"),
        pytest.param([0] * 10, 2 * [True, True, True, False, False], id="in turns"),
        pytest.param(
            [0, 0, 1, 0, 0, 0, 0], [True, True, False, True, True, True, False], id="from the start"
        ),
    ],
)
def test_a_drafter_pauses_while_plain_decoding_stands(
    standing: list[int | None], paused: list[bool]
) -> None:
    pause = DrafterPause(paused=3, active=2)
    assert [pause.is_paused(one) for one in standing] == paused


def test_a_paused_drafter_can_be_resumed_early() -> None:
    pause = DrafterPause(paused=5, active=2)
    assert [pause.is_paused(0) for _ in range(2)] == [True, True]
    pause.resume()
    pause.resume()
    assert [pause.is_paused(0) for _ in range(3)] == [False, False, True]
    assert [pause.is_paused(None), pause.is_paused(0)] == [False, True]
