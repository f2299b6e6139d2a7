"""The choice beside tree sizes, a slow host, and two sources of drafts, in simulated rounds."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product

import pytest

from specengine.core.spec_stats import DraftShape
from specengine.engine.adaptive.costs import PLAIN, RunningCosts, StepCosts
from specengine.engine.adaptive.estimate import HostSeconds
from specengine.engine.adaptive.state import DepthChooser
from tests.support.adaptive import (
    DEPTH,
    SIZES,
    TreeWorld,
    World,
    best_depth,
    changes,
    measured,
    measured_trees,
    mostly,
    seen,
    tree_cost,
)

EVEN = [0.6] * DEPTH
TREE = [0.55, 0.2, 0.1]  # chances of the children of a node
WHOLE, SMALL = DraftShape(DEPTH), DraftShape(DEPTH, 5)
BOTH = pytest.mark.parametrize("is_timed", [False, True], ids=["from a table", "learned"])


def tree_steps(is_timed: bool = False) -> DepthChooser:
    costs = None if is_timed else measured_trees()
    return DepthChooser(range(DEPTH + 1), costs, sizes=SIZES)


@BOTH
def test_the_smaller_tree_is_chosen_where_nodes_cost(is_timed: bool) -> None:
    """And the whole one at batch size 1, where they do not."""
    world = TreeWorld(TREE, tree_cost, is_timed=is_timed)
    costs = None if is_timed else measured_trees()
    steps = DepthChooser([0, DEPTH], costs, sizes={DEPTH: SIZES[DEPTH]})
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
    steps = DepthChooser(range(DEPTH + 1), costs, sizes=SIZES)
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
    steps = DepthChooser([0, DEPTH], costs, sizes={DEPTH: [5, 8]})
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
    steps = DepthChooser(range(DEPTH + 1), measured(), host=HostSeconds())
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
    steps = DepthChooser(range(DEPTH + 1), measured(), host=host)
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
    steps = DepthChooser(range(DEPTH + 1), measured(), host=host)
    assert host_world(flat(9.0)).run(steps, 16, 4000)[-400:].count(DEPTH) > 380


def test_a_fast_host_changes_no_round() -> None:
    runs = []
    for host in (None, HostSeconds()):
        steps = DepthChooser(range(DEPTH + 1), measured(), host=host)
        runs.append(host_world(flat(0.5)).run(steps, 16, 600))
    assert runs[0] == runs[1]


MODEL, LOOKUP = 3, 7  # steps
PAYS = 0.9  # acceptance of a model beside which one source goes as right as two


@dataclass
class HybridWorld:
    """A request at a time. In a share of the rounds it has a match, for which the model does not
    run."""

    match_share: float
    model: Sequence[float]  # acceptance by position
    level: float  # seconds of a level of the model's, beside 1 of the target's
    random: random.Random = field(default_factory=lambda: random.Random(0))

    def run(self, steps: DepthChooser, rounds: int) -> list[int]:
        return [self._round(steps) for _ in range(rounds)]

    def _round(self, steps: DepthChooser) -> int:
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
        pytest.param(0.02, PAYS, 0.05, {MODEL, LOOKUP}, id="rare matches, and a model that pays"),
    ],
)
def test_a_hybrid_weighs_both_sources(
    match_share: float, model: float, level: float, expected: set[int]
) -> None:
    """Accepted matches are deep and cheap, which rounds of the model are not."""
    found: dict[int | None, set[int]] = {MODEL: set(), None: set()}
    compared = [MODEL] if model == PAYS else [*found]
    for model_steps, seed in product(compared, range(4)):
        world = HybridWorld(match_share, [model] * MODEL, level, random.Random(seed))
        steps = DepthChooser([0, 1, 2, MODEL, LOOKUP], RunningCosts(), model_steps=model_steps)
        world.run(steps, 400)
        found[model_steps].add(mostly(world.run(steps, 800)))
    assert found[MODEL] <= expected
    assert model == PAYS or not found[None] <= expected, "with one source it would go wrong"
