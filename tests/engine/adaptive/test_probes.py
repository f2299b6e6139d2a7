"""Probes: what is tried when, what it may cost, and when a drafter pauses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import groupby

import pytest

from specengine.engine.adaptive.choose import PROBE_SHARE, DrafterPause, ProbeBudget
from specengine.engine.adaptive.state import DepthChooser
from tests.support.adaptive import (
    mostly,
    seen,
)


def test_costs_are_measured_first_without_a_table() -> None:
    steps = DepthChooser([1, 2])
    first = steps.choose(3)
    assert (first.num_steps, first.expected_gain) == (2, None)
    assert first.reason == "batch 3: measuring the cost of K=2"
    assert steps.current is first
    assert [steps.choose(3).num_steps for _ in range(5)] == [2, 0, 0, 0, 0]
    assert steps.choose(3).reason == "batch 3: K=2, the cost of drafts is not known yet"


def test_plain_rounds_are_probed_in_a_row() -> None:
    """The first of them has nothing to overlap with: its time is not told."""
    steps, chosen = DepthChooser([0, 3]), [3]
    for _ in range(600):
        depth = steps.choose(4).num_steps
        seconds = 5.0 if depth else 1.0 if chosen[-1] == 0 else None
        steps.observe(seen(depth, [depth] * 4, [2 if depth else 0] * 4, seconds=seconds))
        chosen.append(depth)
    assert chosen[-200:].count(0) > 190
    steps, chosen = DepthChooser([0, 3]), []
    for _ in range(2000):
        depth = steps.choose(4).num_steps
        steps.observe(seen(depth, [depth] * 4, [min(depth, 2)] * 4, seconds=1.0))
        chosen.append(depth)
    assert {len([*run]) for depth, run in groupby(chosen[600:-4]) if depth == 0} == {4}


def run_by_hand(
    steps: DepthChooser,
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


def in_debt(steps: DepthChooser, batch_size: int) -> None:
    """As deep as it gets."""
    budget = steps._bucket(batch_size).budget
    budget.pay(1e9, 1.0, drafting_seconds=1e9)
    assert budget.saved == -16.0


def test_plain_rounds_that_were_slow_at_first_are_probed_again() -> None:
    """After a prefill the host comes late."""

    def cost(place: int, depth: int) -> float:
        return 11.0 * depth / 8 if depth else 1.6 if place < 8 else 1.0

    chosen = run_by_hand(DepthChooser([0, 4, 8]), 256, 80, cost, lambda depth: 6 * depth // 8)
    assert set(chosen[60:]) == {0}


@pytest.mark.parametrize(
    ("lost_at", "most"), [(64, 1000), (256, 9000)], ids=["at another size", "at this"]
)
def test_debt_of_one_batch_size_forbids_no_probes_at_another(lost_at: int, most: int) -> None:
    steps = DepthChooser([0, 4])
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
    steps = DepthChooser([0, 2, 8])
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

    chosen = run_by_hand(DepthChooser([0, 1, 2, 3]), 1, 80, cost, lambda depth: depth)
    assert mostly(chosen[40:]) == 3


def test_drafts_that_seem_better_are_tried_whatever_debt_there_is() -> None:
    """Plain decoding stands, probes have left a debt, and plain rounds become slower."""
    paid, steps = {0: 1.0, 3: 4.5}, DepthChooser([0, 3])
    by_hand = partial(run_by_hand, steps, 1, kept=lambda depth: depth)
    assert set(by_hand(40, cost=lambda place, depth: paid[depth])[6:]) == {0}
    in_debt(steps, 1)
    paid[0] = 2.0
    chosen = by_hand(80, cost=lambda place, depth: paid[depth])
    assert chosen[0] == 0
    assert set(chosen[-20:]) == {3}


def test_deeper_drafts_are_probed_where_plain_rounds_are_not_timed() -> None:
    """Plain rounds beside a lookup drafter are not, where none follows another."""
    steps = DepthChooser([0, 2, 8])

    def cost(place: int, depth: int) -> float | None:
        return 1.0 + 0.4 * depth if depth else 1.0 if place < 6 else None

    chosen = run_by_hand(steps, 4, 3000, cost, lambda depth: 1 if depth else 0)
    assert mostly(chosen) == 2
    assert chosen[200:].count(8) > 5


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
