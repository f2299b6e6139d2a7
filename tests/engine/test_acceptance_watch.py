from __future__ import annotations

import pytest

from specengine.core.spec_totals import SpecTotals
from specengine.engine.acceptance_watch import AcceptanceWatch


def warnings_of(accepted: list[int], caplog: pytest.LogCaptureFixture) -> list[str]:
    """Warnings while rounds of 3 drafted tokens accept so many of them."""
    totals, watch = SpecTotals(), AcceptanceWatch()
    for count in accepted:
        totals.record(1, [3], [count])
        watch.check(totals)
    return [record.getMessage() for record in caplog.records]


def test_warns_once_of_a_drafter_that_never_helps(caplog: pytest.LogCaptureFixture) -> None:
    (warning,) = warnings_of([0] * 1000, caplog)
    assert "specengine doctor" in warning
    assert "0.00 tokens accepted of each of the last 200 drafts" in warning


def test_says_nothing_before_two_hundred_rounds(caplog: pytest.LogCaptureFixture) -> None:
    assert not warnings_of([0] * 199, caplog)


def test_a_drafter_that_helps_a_little_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    assert not warnings_of(([0] * 19 + [1]) * 50, caplog)


def test_a_drafter_that_stops_helping_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    assert len(warnings_of([3] * 400 + [0] * 200, caplog)) == 1
