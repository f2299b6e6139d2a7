"""What probes may cost, in all."""

from __future__ import annotations

import pytest

from specengine.engine.adaptive.choose import PROBE_SHARE, ProbeBudget

ROUND = 2.0  # seconds


def rounds_until(budget: ProbeBudget, loss: float, most: int = 10_000) -> int:
    for count in range(most):
        if budget.allows(loss, ROUND):
            return count
        budget.earn(ROUND)
    return most


def saved(rounds: float = 0.0) -> ProbeBudget:
    budget = ProbeBudget()
    for _ in range(round(rounds / PROBE_SHARE)):
        budget.earn(ROUND)
    return budget


def test_a_share_of_all_time_may_be_lost() -> None:
    budget, lost = ProbeBudget(), 0.0
    for _ in range(5000):
        if budget.allows(0.7 * ROUND, ROUND):
            budget.pay(0.7 * ROUND, ROUND)
            lost += 0.7 * ROUND
        budget.earn(ROUND)
    assert 0.9 * PROBE_SHARE < lost / (5000 * ROUND) <= PROBE_SHARE


def test_what_a_probe_took_for_itself_is_charged_in_full() -> None:
    budget = saved()
    budget.pay(7 * ROUND, ROUND, own=6.5 * ROUND)
    assert budget.saved == pytest.approx(-7 * ROUND)
    assert rounds_until(budget, 0.0) == pytest.approx(7 / PROBE_SHARE, abs=1)


def test_what_held_it_up_is_not() -> None:
    for own, charged in ((0.0, 2.0), (0.5, 2.5)):
        budget = saved()
        budget.pay(500 * ROUND, ROUND, own=own * ROUND)
        assert budget.saved == pytest.approx(-charged * ROUND)


def test_a_probe_that_gains_pays_for_the_next_whatever_it_took() -> None:
    budget = saved()
    budget.pay(-0.5 * ROUND, ROUND, own=3 * ROUND)
    assert budget.allows(0.5 * ROUND, ROUND)


def test_no_debt_is_forever() -> None:
    """Nor where rounds become shorter."""
    budget = saved()
    for _ in range(3):
        budget.pay(1000 * ROUND, ROUND, own=1000 * ROUND)
    most = rounds_until(budget, 1000 * ROUND)
    assert 2000 < most < 4000
    budget.pay(1000 * ROUND, 50 * ROUND, own=1000 * ROUND)
    assert rounds_until(budget, 1000 * ROUND) <= most + 1


def test_little_is_saved_up() -> None:
    budget = saved(rounds=50)
    budget.pay(3 * ROUND, ROUND, own=3 * ROUND)
    assert not budget.allows(0.1 * ROUND, ROUND)
