"""What graphs did, and snapshots of recurrent state, in /metrics."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from specengine.engine.outputs import EngineStats, SplitStats
from specengine.runner.fallbacks import GraphStats
from specengine.scheduler.split_policy import SplitDecision
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


def test_split_prompts_are_counted_where_they_are_asked_for() -> None:
    decision = SplitDecision(layers=4, share=0.5, reason="why")
    split = SplitStats(1, 5, 6, 40, 30, 160, 2, 7, {"cuda-bindings is not installed": 5}, decision)
    found = samples(EngineStats(split=split), "split_prefill_")
    assert found == {
        ("split_prefill_under_way",): 1,
        ("split_prefill_forwards_total",): 5,
        ("split_prefill_prompts_total",): 6,
        ("split_prefill_calls_total",): 40,
        ("split_prefill_turns_total",): 30,
        ("split_prefill_layers_total",): 160,
        ("split_prefill_left_total",): 2,
        ("split_prefill_rounds_on_all_sms_total",): 7,
        ("split_prefill_fallbacks_total", "cuda-bindings is not installed"): 5,
        ("split_prefill_layers_a_call",): 4,
        ("split_prefill_sm_share",): 0.5,
        ("split_prefill_choice_info", "why"): 1,
    }
    assert samples(EngineStats(), "split_prefill_") == {}
