"""The size of trees, chosen by cost: what smaller ones would accept is known without running them,
and one is chosen only where that pays."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from specengine.core.errors import ConfigError
from specengine.engine.adaptive.acceptance import Acceptance, PositionShares, RoundObservation
from specengine.engine.adaptive.costs import DraftShape, PLAIN, RunningCosts, StepCosts
from specengine.engine.adaptive.estimate import smaller_sizes
from specengine.engine.adaptive.state import AdaptiveSteps
from tests.engine.tree_world import (
    DEPTH,
    SIZES,
    TreeWorld,
    measured,
    ranks_of,
    round_cost,
    tree_of,
)

CHANCES = [0.55, 0.2, 0.1]
WHOLE = DraftShape(DEPTH)
SMALL = DraftShape(DEPTH, 5)


def steps_of(is_timed: bool = False) -> AdaptiveSteps:
    return AdaptiveSteps(range(DEPTH + 1), None if is_timed else measured(), sizes=SIZES)


def mostly(chosen: list[DraftShape]) -> DraftShape:
    return Counter(chosen).most_common(1)[0][0]


def expected(acceptance: Acceptance, num_nodes: int | None) -> float:
    tokens, path = 1.0, 1.0
    for chance in acceptance.chances(num_nodes):
        path *= chance
        tokens += path
    return tokens


@pytest.mark.parametrize("num_nodes", [2, 4, 5, 8, None])
def test_whole_trees_tell_what_smaller_ones_would_accept(num_nodes: int | None) -> None:
    """As many tokens as when those are really run."""
    world = TreeWorld(CHANCES, round_cost)
    acceptance = Acceptance(DEPTH, [2, 4, 5, 8])
    tree = tree_of(CHANCES, WHOLE)
    for _ in range(600):
        ranks = [ranks_of(tree, world.draw()) for _ in range(8)]
        outcomes = RoundObservation([len(tree)] * 8, [len(one) for one in ranks], ranks)
        acceptance.observe(DEPTH, outcomes)
    run = world.tokens(DraftShape(DEPTH, num_nodes))
    assert expected(acceptance, num_nodes) == pytest.approx(run, abs=0.2)


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("cut_to", [None, 4])
def test_many_requests_count_as_each_does(depth: int, cut_to: int | None) -> None:
    """Place by place, of every size those that tell it from the one before."""
    draw, sizes, deepest = random.Random(depth), [3, 4, 8], 3
    acceptance = Acceptance(deepest, sizes)
    compared = [PositionShares(deepest, 0.2) for _ in sizes]
    for _ in range(60):
        drafted = [
            draw.choice([0, 3]) if cut_to else draw.choice([0, 2, 3, 7, 15]) for _ in "12345"
        ]
        limits = [draw.choice([1, 2, 3]) for _ in drafted]
        levels = [min(pair) for pair in zip(drafted, limits, strict=True)]
        ranks = [
            sorted(draw.sample(range(1, nodes + 1), draw.randint(0, min(level, depth))))
            for nodes, level in zip(drafted, levels, strict=True)
        ]
        accepted = [len(one) for one in ranks]
        acceptance.observe(depth, RoundObservation(drafted, accepted, ranks, cut_to, limits))
        told = sizes[: len(sizes) if cut_to is None else sizes.index(cut_to)]
        by_size = [[sum(rank < size for rank in one) for one in ranks] for size in told]
        by_size.append(accepted)
        for index, (small, large) in enumerate(pairwise(by_size)):
            least = sizes[index + 1] - 1 if index + 1 < len(sizes) else sizes[-1]
            tells = [depth == deepest or nodes >= least for nodes in drafted]
            for place in range(deepest):
                fell = [
                    after > place
                    for level, before, after, does in zip(levels, small, large, tells, strict=True)
                    if does and min(level, depth) > place >= before
                ]
                compared[index].add(place, len(fell), sum(fell))
    for own, other in zip(acceptance.rescues, compared, strict=True):
        assert own.chances() == other.chances()


def test_a_tree_of_n_nodes_has_the_ranks_below_n() -> None:
    """The root has rank 0."""
    acceptance = Acceptance(3, [3, 4])
    for _ in range(600):
        acceptance.observe(3, RoundObservation([15] * 2, [3, 3], [[1, 2, 3], [1, 2, 3]]))
    assert acceptance.chances(3) == pytest.approx([1.0, 1.0, 0.0], abs=0.02)
    assert acceptance.chances(4) == pytest.approx([1.0, 1.0, 1.0], abs=0.02)
    assert acceptance.chances() == pytest.approx([1.0, 1.0, 1.0], abs=0.02)


def test_requests_that_limit_themselves_say_nothing_of_deeper_places() -> None:
    """However many nodes their trees have."""
    steps = AdaptiveSteps([0, 1, 3], sizes={3: [4]})
    for _ in range(100):
        told = [15, 15, 4], [3, 3, 1], None, None, [[1, 2, 3], [1, 2, 5], [1]]
        steps.observe(3, 3, *told, limits=[3, 3, 1])
    for size in (None, 4):
        assert steps.acceptance.chances(size)[:2] == pytest.approx([1.0, 1.0], abs=0.05)
    assert steps.acceptance.chances()[2] == pytest.approx(1.0, abs=0.05)
    assert steps.acceptance.chances(4)[2] == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("size", [2, 5, 8])
def test_of_every_path_a_smaller_tree_keeps_its_nodes(size: int) -> None:
    """Path by path, against walks down the smaller tree."""
    world, whole = TreeWorld(CHANCES, round_cost), tree_of(CHANCES, WHOLE)
    small = tree_of(CHANCES, DraftShape(DEPTH, size))
    assert small == whole[: size - 1]
    for _ in range(500):
        text = world.draw()
        kept = [rank for rank in ranks_of(whole, text) if rank < size]
        assert kept == ranks_of(small, text)


def test_no_size_is_thought_to_reach_less_than_a_smaller_one() -> None:
    """Even where larger ones were seen only when nothing stood."""
    acceptance = Acceptance(DEPTH, [5, 8])
    for _ in range(200):
        acceptance.observe(DEPTH, RoundObservation([15] * 4, [0] * 4, [[]] * 4))
    for _ in range(500):
        acceptance.observe(DEPTH, RoundObservation([4] * 4, [3] * 4, [[1, 2, 3]] * 4, 5))
    found = [expected(acceptance, size) for size in (5, 8, None)]
    assert found == sorted(found)
    assert found[0] == pytest.approx(4.0, abs=0.1)


def test_no_place_is_thought_to_be_reached_more_often_than_those_above_it() -> None:
    """Though each place forgets at its own pace."""
    rng, acceptance = random.Random(0), Acceptance(DEPTH, [5, 9])
    for _ in range(300):
        size = rng.choice([5, 9, None])
        most = 40 if size is None else size
        ranks = [sorted(rng.sample(range(1, most), rng.randrange(DEPTH + 1))) for _ in range(4)]
        accepted = [len(row) for row in ranks]
        acceptance.observe(DEPTH, RoundObservation([most - 1] * 4, accepted, ranks, size))
        for one in (5, 9, None):
            assert max(acceptance.chances(one)) <= 1.0


def test_small_rounds_leave_what_larger_trees_add() -> None:
    acceptance = Acceptance(DEPTH, [5])
    for _ in range(300):
        acceptance.observe(1, RoundObservation([15] * 2, [1, 1], [[1], [9]]))
    assert acceptance.chances(5)[0] == pytest.approx(0.5, abs=0.02)
    assert acceptance.chances()[0] == pytest.approx(1.0, abs=0.02)
    for _ in range(600):
        acceptance.observe(1, RoundObservation([4] * 2, [0, 0], [[], []], 5))
    assert acceptance.chances(5)[0] == pytest.approx(0.0, abs=0.02)
    assert acceptance.chances()[0] == pytest.approx(1.0, abs=0.02), "as far as anybody knows"


def test_a_whole_tree_in_place_of_a_smaller_one_does_not_count_as_that() -> None:
    """Which flies where there is no graph of the size that was chosen."""
    acceptance = Acceptance(DEPTH, [5])
    for _ in range(300):
        acceptance.observe(1, RoundObservation([15] * 2, [1, 1], [[1], [9]], 5))
    assert acceptance.chances(5)[0] == pytest.approx(0.5, abs=0.02)
    assert acceptance.chances()[0] == pytest.approx(1.0, abs=0.02)


def test_trees_of_few_nodes_do_not_speak_for_larger_ones() -> None:
    """A shallow tree may have no more nodes than a smaller deep one: nothing tells them apart."""
    acceptance = Acceptance(DEPTH, [5])
    before = acceptance.chances()[0] - acceptance.chances(5)[0]
    for _ in range(300):
        acceptance.observe(1, RoundObservation([3] * 2, [0, 0], [[], []]))
    after = acceptance.chances()[0] - acceptance.chances(5)[0]
    assert after > before > 0.0


@pytest.mark.parametrize("is_timed", [False, True])
def test_the_smaller_tree_is_chosen_where_nodes_cost(is_timed: bool) -> None:
    """The whole one at batch 1, where they do not."""
    world = TreeWorld(CHANCES, round_cost, is_timed=is_timed)
    costs = None if is_timed else measured()
    steps = AdaptiveSteps([0, DEPTH], costs, sizes={DEPTH: SIZES[DEPTH]})
    assert mostly(world.run(steps, 1, 300)[-100:]) == WHOLE
    assert mostly(world.run(steps, 8, 500)[-150:]) == DraftShape(DEPTH, 8)
    assert mostly(world.run(steps, 16, 500)[-150:]) == SMALL
    assert mostly(world.run(steps, 1, 100)[-50:]) == WHOLE


@pytest.mark.parametrize("is_timed", [False, True])
@pytest.mark.parametrize("batch_size", [1, 4, 16, 64])
def test_of_all_shapes_one_as_good_as_the_best_is_found(batch_size: int, is_timed: bool) -> None:
    """Within what the margin leaves open, and what shallow trees are thought to reach."""
    world, steps = TreeWorld(CHANCES, round_cost, 0.02, is_timed), steps_of(is_timed)
    found = mostly(world.run(steps, batch_size, 600)[-150:])
    rates = {shape: world.rate(shape, batch_size) for shape in steps.shapes}
    assert rates[found] > 0.94 * max(rates.values())


@pytest.mark.parametrize("is_timed", [False, True])
def test_sizes_are_not_chosen_where_nobody_ranks_nodes(is_timed: bool) -> None:
    world = TreeWorld(CHANCES, round_cost, is_timed=is_timed, tells_ranks=False)
    steps = steps_of(is_timed)
    for batch_size in (1, 16, 64):
        assert {one.num_nodes for one in world.run(steps, batch_size, 300)} == {None}


def test_sizes_are_not_chosen_whose_cost_was_not_measured() -> None:
    costs = StepCosts(measured().seconds)
    steps = AdaptiveSteps(range(DEPTH + 1), costs, sizes=SIZES)
    world = TreeWorld(CHANCES, round_cost)
    assert {one.num_nodes for one in world.run(steps, 16, 300)} == {None}


def test_noise_makes_no_size_flap() -> None:
    world, steps = TreeWorld(CHANCES, round_cost, noise=0.05, is_timed=True), steps_of(True)
    world.run(steps, 8, 300)
    stood = []
    for _ in range(800):
        world.run(steps, 8, 1)
        assert steps.current is not None
        stood.append(steps.current.shape)
    assert sum(a != b for a, b in pairwise(stood)) <= 800 // 80


@pytest.mark.parametrize("is_timed", [False, True])
def test_what_larger_trees_add_is_noticed_when_it_comes_back(is_timed: bool) -> None:
    """Small rounds do not show it: larger ones are tried now and then."""
    cost = {SMALL: 1.2, DraftShape(DEPTH, 8): 1.22, WHOLE: 1.25}
    world = TreeWorld([0.8], lambda _, shape: cost.get(shape, 1.0 if shape == PLAIN else 9.0))
    world.is_timed = is_timed
    costs = None if is_timed else measured(world.cost)
    steps = AdaptiveSteps([0, DEPTH], costs, sizes={DEPTH: [5, 8]})
    assert mostly(world.run(steps, 4, 600)[-100:]) == SMALL
    world.chances = [0.45, 0.45]
    assert mostly(world.run(steps, 4, 2000)[-100:]) == WHOLE


def test_trying_larger_trees_costs_little() -> None:
    world, steps = TreeWorld([0.8], round_cost), steps_of()
    world.run(steps, 16, 200)
    chosen = world.run(steps, 16, 2000)
    standing = mostly(chosen)
    usual = world.tokens(standing) / round_cost(16, standing)
    spent = sum(round_cost(16, shape) for shape in chosen)
    tokens = {shape: world.tokens(shape) for shape in set(chosen)}
    assert sum(tokens[shape] for shape in chosen) / spent > 0.98 * usual


def test_the_size_is_said() -> None:
    steps = steps_of()
    TreeWorld(CHANCES, round_cost).run(steps, 16, 300)
    decision = steps.current
    assert decision is not None
    assert decision.num_nodes is not None
    assert decision.reason.startswith(
        f"batch 16: K={decision.num_steps} with {decision.num_nodes} nodes, "
    )


def test_smaller_trees_cost_what_was_measured_or_what_whole_ones_do() -> None:
    costs = StepCosts({1: {0: 1.0, 4: 2.0}, 8: {0: 2.0, 4: 6.0}}, {5: {8: {4: 3.0}}})
    assert costs.of(8, 4, 5) == 3.0
    assert costs.of(8, 2, 5) == pytest.approx(2.5)
    assert costs.of(1, 4, 5) == 2.0
    assert costs.of(8, 4, 6) is None


def test_a_file_keeps_smaller_trees(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    measured().write(path)
    assert StepCosts.read(path).smaller_trees == measured().smaller_trees
    path.write_text('{"seconds": {"1": {"0": 1, "4": 2}}, "smaller_trees": {"5": {"1": {"4": 0}}}}')
    with pytest.raises(ConfigError, match="batch size 1: seconds must be above 0"):
        StepCosts.read(path)


def test_rounds_teach_the_cost_of_each_size() -> None:
    costs = RunningCosts()
    costs.record(8, 4, 32, 6.0)
    costs.record(8, 4, 32, 3.0, 5)
    assert costs.of(8, 4, 5) is None, "plain decoding has not run"
    costs.record(8, 0, 0, 1.0)
    assert (costs.of(8, 4), costs.of(8, 4, 5), costs.of(8, 4, 8)) == (6.0, 3.0, None)
    assert costs.of(8, 2, 5) == pytest.approx(2.0)
    costs.record(8, 4, 0, 0.5, 5)  # no request had a draft
    assert costs.of(8, 0) == 0.5
    for _ in range(8):
        costs.record(8, 4, 32, 3.0, 5)
    assert costs.is_settled(8, 4, 5)
    assert not costs.is_settled(8, 4)


@pytest.mark.parametrize(
    ("steps", "whole", "sizes"),
    [
        ([0, 1, 2, 3], [1, 5, 16, 16], {1: [2], 2: [4], 3: [4, 8]}),
        ([0, 1, 2, 3], [1, 3, 7, 8], {1: [2], 2: [3], 3: [4]}),
        ([0, 1], [1, 2], {}),
        ([0, 5], [1, 1, 1, 1, 1, 6], {}),
    ],
)
def test_a_few_sizes_are_to_choose_from(
    steps: list[int], whole: list[int], sizes: dict[int, list[int]]
) -> None:
    assert smaller_sizes(steps, whole.__getitem__) == sizes
