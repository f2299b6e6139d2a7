"""A drafter sleeps while no drafts stand, and wakes now and then."""

from __future__ import annotations

from specengine.engine.adaptive.naps import Naps


def test_it_is_awake_while_drafts_stand_or_nothing_is_settled() -> None:
    naps = Naps(asleep=3, awake=2)
    assert not any(naps.sleeps(standing) for standing in (None, 1, 3, None, 2))


def test_it_sleeps_and_wakes_by_turns() -> None:
    naps = Naps(asleep=3, awake=2)
    assert [naps.sleeps(0) for _ in range(10)] == 2 * [True, True, True, False, False]


def test_drafts_that_come_back_end_the_turns() -> None:
    naps = Naps(asleep=3, awake=2)
    assert [naps.sleeps(0) for _ in range(2)] == [True, True]
    assert not naps.sleeps(1)
    assert [naps.sleeps(0) for _ in range(4)] == [True, True, True, False]
