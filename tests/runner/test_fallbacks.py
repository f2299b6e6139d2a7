"""Counters of graphs: a reason is logged once and counted always."""

from __future__ import annotations

import logging
from collections import Counter

import pytest

from specengine.runner.fallbacks import GraphStats, NoGraphs, count_fallback


def test_reason_is_logged_once_and_counted_always(caplog: pytest.LogCaptureFixture) -> None:
    counters: Counter[str] = Counter(captures=2, replays=7)
    with caplog.at_level(logging.INFO):
        for reason in ("grammar", "grammar", "memory nearly full", "grammar"):
            count_fallback(counters, "round", reason)
    logged = [record.getMessage() for record in caplog.records]
    assert [line.split(" (")[0] for line in logged] == [
        "a batch without a round graph: grammar",
        "a batch without a round graph: memory nearly full",
    ]
    assert GraphStats.of(counters) == GraphStats(2, 7, {"grammar": 3, "memory nearly full": 1})


def test_stats_of_no_counts_are_zero() -> None:
    assert GraphStats.of(Counter()) == GraphStats(0, 0, {})


def test_no_graphs_counts_every_batch_as_one_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        none = NoGraphs("round", "rounds are traced")
        assert [one.getMessage() for one in caplog.records] == [
            "no round graphs: rounds are traced"
        ]
        assert GraphStats.of(none.counters) == GraphStats()
        for _ in range(3):
            none.count()
    assert len(caplog.records) == 2, "the first batch is logged"
    assert GraphStats.of(none.counters) == GraphStats(0, 0, {"rounds are traced": 3})
    assert NoGraphs("round", "another engine's").counters is not none.counters
