"""What graphs did, and snapshots of recurrent state, in /metrics."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from specengine.engine.outputs import EngineStats
from specengine.runner.fallbacks import GraphStats
from specengine.server.metrics import ServerMetrics


def samples(stats: EngineStats, start: str = "graph_") -> dict[tuple[str, ...], float]:
    text = ServerMetrics(lambda: stats).render().decode()
    return {
        (sample.name.removeprefix("specengine:"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith(f"specengine:{start}")
    }


def test_counters_by_kind_and_reason() -> None:
    round_graphs = GraphStats(captures=36, replays=1000, fallbacks={"grammar": 3, "sampling": 2})
    found = samples(EngineStats(graphs={"decode": GraphStats(captures=36), "round": round_graphs}))
    del found["graph_forwards_total",]
    assert found == {
        ("graph_captures_total", "decode"): 36,
        ("graph_captures_total", "round"): 36,
        ("graph_replays_total", "decode"): 0,
        ("graph_replays_total", "round"): 1000,
        ("graph_fallbacks_total", "round", "grammar"): 3,
        ("graph_fallbacks_total", "round", "sampling"): 2,
    }


def test_no_graphs_no_samples() -> None:
    assert samples(EngineStats()) == {("graph_forwards_total",): 0}


def test_snapshots_are_counted_where_the_target_keeps_recurrent_state() -> None:
    found = samples(EngineStats(num_state_snapshots=3, num_evicted_snapshots=2), "state_")
    assert found == {("state_snapshots",): 3, ("state_snapshot_evictions_total",): 2}
    assert samples(EngineStats(), "state_") == {}
