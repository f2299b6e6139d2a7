"""The chosen depth in simulated rounds: it converges, costs no more than it may, and comes back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import groupby, pairwise

import pytest

from specengine.engine.adaptive.choose import Decision
from specengine.engine.adaptive.costs import DraftShape, bucket
from specengine.engine.adaptive.state import AdaptiveSteps
from tests.engine.adaptive_world import DEPTH, World, best_depth, measured, rate

SETTLED_AFTER = 150  # rounds
USELESS, POOR, FAIR, GOOD = [0.0] * DEPTH, [0.1] * DEPTH, [0.5] * DEPTH, [0.9, 0.8, 0.8, 0.7]
FIRST_ONLY = [0.9, 0.05, 0.05, 0.05]
ALL = [USELESS, POOR, FAIR, GOOD, FIRST_ONLY]


def adaptive(is_timed: bool) -> AdaptiveSteps:
    """With costs from the rounds, or from a table."""
    return AdaptiveSteps(range(DEPTH + 1), None if is_timed else measured())


def mostly(chosen: list[int]) -> int:
    return Counter(chosen).most_common(1)[0][0]


@pytest.mark.parametrize("is_timed", [False, True])
@pytest.mark.parametrize("batch_size", [1, 16, 64])
@pytest.mark.parametrize("chances", ALL)
def test_it_converges_to_a_depth_as_good_as_the_best(
    chances: list[float], batch_size: int, is_timed: bool
) -> None:
    """Within what the margin leaves open."""
    world = World(chances, is_timed=is_timed, noise=0.02)
    chosen = world.run(adaptive(is_timed), batch_size, SETTLED_AFTER + 100)
    found = mostly(chosen[SETTLED_AFTER:])
    best = best_depth(chances, batch_size)
    assert rate(chances, batch_size, found) > 0.95 * rate(chances, batch_size, best)


@pytest.mark.parametrize("is_timed", [False, True])
@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize(
    ("chances", "batch_size"), [(USELESS, 1), (USELESS, 32), (POOR, 64), (GOOD, 256)]
)
def test_useless_drafts_cost_at_most_two_percent(
    chances: list[float], batch_size: int, noise: float, is_timed: bool
) -> None:
    world = World(chances, is_timed=is_timed, noise=noise)
    steps = adaptive(is_timed)
    chosen = world.run(steps, batch_size, 3000 if batch_size == 1 else 1500)
    assert world.seconds < 1.02 * world.plain_seconds
    assert mostly(chosen) == 0
    assert max(chosen[SETTLED_AFTER:]) > 0, "drafts are tried again"


@pytest.mark.parametrize("is_timed", [False, True])
def test_acceptance_that_comes_back_is_noticed(is_timed: bool) -> None:
    world = World(USELESS, is_timed=is_timed, noise=0.02)
    steps = adaptive(is_timed)
    assert mostly(world.run(steps, 4, 600)[-100:]) == 0
    world.chances = GOOD
    found = mostly(world.run(steps, 4, 800)[-100:])
    assert rate(GOOD, 4, found) > 0.95 * rate(GOOD, 4, best_depth(GOOD, 4))


@pytest.mark.parametrize("is_timed", [False, True])
def test_deeper_acceptance_that_comes_back_is_noticed(is_timed: bool) -> None:
    world = World(FIRST_ONLY, is_timed=is_timed)
    steps = adaptive(is_timed)
    assert mostly(world.run(steps, 4, 400)[-100:]) <= 2
    world.chances = [0.9] * DEPTH
    assert mostly(world.run(steps, 4, 1200)[-100:]) >= 3


@pytest.mark.parametrize("is_timed", [False, True])
def test_noise_makes_no_choice_flap(is_timed: bool) -> None:
    """Changes of what stands; rounds that only find out are none."""
    world = World(FAIR, is_timed=is_timed, noise=0.05)
    steps = adaptive(is_timed)
    world.run(steps, 8, SETTLED_AFTER)
    stood = []
    for _ in range(800):
        world.run(steps, 8, 1)
        assert steps.current is not None
        stood.append(steps.current.num_steps)
    changes = sum(a != b for a, b in pairwise(stood))
    assert changes <= 800 // 80


def test_costs_that_change_are_followed() -> None:
    """Deep drafts become dear, as where texts grow long or the machine busy."""
    world = World(GOOD, noise=0.02)
    steps = adaptive(is_timed=True)
    assert mostly(world.run(steps, 1, 300)[-100:]) >= 3
    world.cost = lambda batch_size, num_steps: 1.0 + 2.0 * num_steps
    assert mostly(world.run(steps, 1, 1500)[-100:]) == 0


def test_a_machine_that_slows_down_changes_nothing() -> None:
    world = World(GOOD, noise=0.02)
    steps = adaptive(is_timed=True)
    world.run(steps, 1, 300)
    before = world.cost
    world.cost = lambda batch_size, num_steps: 2.0 * before(batch_size, num_steps)
    chosen = world.run(steps, 1, 600)
    assert sum(depth >= 3 for depth in chosen) > 500


@pytest.mark.parametrize("coverage", [0.0, 0.2])
def test_requests_without_a_draft_speak_neither_for_it_nor_against(coverage: float) -> None:
    world = World(GOOD, coverage=coverage, noise=0.02)
    assert mostly(world.run(adaptive(is_timed=True), 1, 400)[-200:]) >= 3
    assert world.seconds < 1.02 * world.plain_seconds


def test_a_graph_takes_no_less_where_a_request_is_at_its_end() -> None:
    """It has no draft there, and the others do: in a graph all are as deep as the deepest."""
    gains = []
    for coverage in (1.0, 0.9):
        steps = AdaptiveSteps(range(DEPTH + 1), measured(), pads=True)
        World(GOOD, coverage=coverage, is_timed=False).run(steps, 16, 300)
        view = steps.prospects.of(16)
        assert view is not None
        assert view.seconds[DraftShape(DEPTH)] == measured().of(16, DEPTH)
        gains.append(view.tokens[DraftShape(DEPTH)])
    assert gains[1] < gains[0], "but promises less"


def test_each_batch_size_has_its_own_choice() -> None:
    world = World(GOOD, is_timed=False)
    steps = adaptive(is_timed=False)
    for _ in range(20):
        world.run(steps, 1, 10)
        world.run(steps, 256, 10)
    assert mostly(world.run(steps, 1, 30)) >= 3
    assert mostly(world.run(steps, 256, 30)) == 0


def test_rounds_may_be_chosen_before_the_last_has_landed() -> None:
    world, steps = World(USELESS, is_timed=False), adaptive(is_timed=False)
    flying: list[int] = []
    chosen: list[int] = []
    for _ in range(1000):
        flying.append(steps.choose(8).num_steps)
        if len(flying) > 1:
            depth = flying.pop(0)
            chosen.append(depth)
            steps.observe(8, depth, [depth] * 8, [0] * 8)
    extra = sum(world.cost(8, depth) - world.cost(8, 0) for depth in chosen)
    assert extra < 0.02 * len(chosen) * world.cost(8, 0)


def test_what_is_being_measured_is_said_too() -> None:
    steps = AdaptiveSteps([1, 2])
    assert steps.current is None
    steps.choose(4)
    assert steps.current is not None
    assert steps.current.reason == "batch 4: measuring the cost of K=2"


def test_the_reason_can_be_read() -> None:
    steps = AdaptiveSteps([1, 2], measured())
    assert steps.current is None
    decision = steps.choose(64)
    assert decision.reason.startswith("batch 64: K=0, the best draft K=1 would be 0.")
    world = World([0.9, 0.8], is_timed=False)
    steps = AdaptiveSteps([1, 2], measured())
    world.run(steps, 1, 200)
    assert steps.current is not None
    assert steps.current.num_steps == 2
    assert steps.current.expected_gain == pytest.approx(2.3, abs=0.2)
    assert steps.current.reason.startswith("batch 1: K=2, 2.")
    assert "x of none; acceptance 0." in steps.current.reason


def test_what_stands_is_told_with_the_figures_of_now() -> None:
    world = World([0.9, 0.8], is_timed=False)
    steps = AdaptiveSteps([1, 2], measured())
    world.run(steps, 1, 200)
    standing = steps.standing(1)
    assert standing is not None
    assert steps.told(standing) == steps.current
    assert steps.told(standing) != standing
    tried = Decision(1, "K=1 tried for a round", None)
    assert steps.told(tried) is tried, "it never stood"
    steps.choose(64)
    assert steps.told(standing) is standing, "of a batch size that has gone"


def test_plain_decoding_is_always_a_choice() -> None:
    assert AdaptiveSteps([3]).steps == [0, 3]


def test_costs_are_measured_first_where_there_is_no_table() -> None:
    steps = AdaptiveSteps([1, 2])
    first = steps.choose(3)
    assert (first.num_steps, first.expected_gain) == (2, None)
    assert first.reason == "batch 3: measuring the cost of K=2"
    tried = Counter(steps.choose(3).num_steps for _ in range(5))
    assert tried == {2: 1, 0: 4}
    assert steps.choose(3).reason == "batch 3: K=2, the cost of drafts is not known yet"


def test_plain_rounds_are_measured_behind_each_other() -> None:
    """A plain round behind a drafted one has nothing to overlap with: its time is not told."""
    steps, chosen = AdaptiveSteps([0, 3]), [3]
    for _ in range(600):
        depth = steps.choose(4).num_steps
        seconds = 5.0 if depth else 1.0 if chosen[-1] == 0 else None
        steps.observe(4, depth, [depth] * 4, [2 if depth else 0] * 4, seconds)
        chosen.append(depth)
    assert chosen[-200:].count(0) > 190


def test_plain_rounds_are_tried_in_a_row() -> None:
    steps, chosen = AdaptiveSteps([0, 3]), []
    for _ in range(2000):
        chosen.append(steps.choose(4).num_steps)
        steps.observe(4, chosen[-1], [chosen[-1]] * 4, [min(chosen[-1], 2)] * 4, 1.0)
    rows = [len(list(run)) for depth, run in groupby(chosen[600:-4]) if depth == 0]
    assert rows
    assert set(rows) == {4}


def run_by_hand(
    steps: AdaptiveSteps,
    batch_size: int,
    rounds: int,
    cost: Callable[[int, int], float | None],
    kept: Callable[[int], int],
) -> list[int]:
    """cost(place, depth): seconds of that round, most of them the host's where it drafts; None:
    not told. kept(depth): drafts that stand -> what was chosen."""
    chosen = []
    for place in range(rounds):
        depth = steps.choose(batch_size).num_steps
        seconds, levels = cost(place, depth), [depth] * batch_size
        drafting = 0.8 * (seconds or 0.0) if depth else 0.0
        accepted = [kept(depth)] * batch_size
        steps.observe(batch_size, depth, levels, accepted, seconds, drafting=drafting)
        chosen.append(depth)
    return chosen


def in_debt(steps: AdaptiveSteps, batch_size: int) -> AdaptiveSteps:
    """As deep as it gets."""
    budget = steps._places[bucket(batch_size)].budget
    budget.pay(1e9, 1.0, own=1e9)
    assert budget.saved == -16.0
    return steps


def test_plain_rounds_that_were_slow_at_first_are_tried_again() -> None:
    """Behind a prefill the host comes late."""

    def cost(place: int, depth: int) -> float:
        return 11.0 * depth / 8 if depth else 1.6 if place < 8 else 1.0

    steps = AdaptiveSteps([0, 4, 8])
    assert set(run_by_hand(steps, 256, 80, cost, lambda depth: 6 * depth // 8)[60:]) == {0}


@pytest.mark.parametrize(
    ("lost_at", "most"), [(64, 1000), (256, 9000)], ids=["at another size", "at this"]
)
def test_what_drafts_lose_at_one_batch_size_forbids_none_at_another(
    lost_at: int, most: int
) -> None:
    """Acceptance comes back: drafts are tried again soon."""
    steps = AdaptiveSteps([0, 4])
    for size in (64, 256):
        run_by_hand(steps, size, 60, lambda place, depth: 1.0 + depth / 8, lambda depth: 0)
    in_debt(steps, lost_at)
    chosen = run_by_hand(steps, 256, most, lambda place, depth: 1.0 + depth / 8, lambda depth: 4)
    first = next(place for place, depth in enumerate(chosen) if depth)
    assert (first > 1000) == (lost_at == 256)


@pytest.mark.parametrize("better", [0, 2])
def test_drafts_that_lose_end_whatever_others_have_cost(better: int) -> None:
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


@pytest.mark.parametrize("slow", range(6))
def test_one_slow_round_among_the_first_does_not_decide(slow: int) -> None:
    """A garbage collection takes as long as fifty rounds of a small model, and comes early."""

    def cost(place: int, depth: int) -> float:
        return 50.0 if place == slow else 1.0 + 0.4 * depth

    chosen = run_by_hand(AdaptiveSteps([0, 1, 2, 3]), 1, 80, cost, lambda depth: depth)
    assert mostly(chosen[40:]) == 3


def test_drafts_that_seem_better_are_tried_whatever_others_have_cost() -> None:
    """Plain decoding stands, probes have left a debt, and plain rounds become slower."""
    paid = {0: 1.0, 3: 4.5}
    steps = AdaptiveSteps([0, 3])
    by_hand = partial(run_by_hand, steps, 1, kept=lambda depth: depth)
    assert set(by_hand(40, cost=lambda place, depth: paid[depth])[6:]) == {0}
    in_debt(steps, 1)
    paid[0] = 2.0
    chosen = by_hand(80, cost=lambda place, depth: paid[depth])
    assert chosen[0] == 0
    assert set(chosen[-20:]) == {3}


def test_deeper_drafts_are_tried_beside_plain_rounds_that_tell_nothing() -> None:
    """Those of a drafter of text tell nothing where no round follows another."""
    steps = AdaptiveSteps([0, 2, 8])

    def cost(place: int, depth: int) -> float | None:
        return 1.0 + 0.4 * depth if depth else 1.0 if place < 6 else None

    chosen = run_by_hand(steps, 4, 3000, cost, lambda depth: 1 if depth else 0)
    assert mostly(chosen) == 2
    assert chosen[200:].count(8) > 5
