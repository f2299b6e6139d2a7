"""Labels, queue time, aborts, drafts by position, and another server's names, in /metrics."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from specengine.core.request import FinishReason
from specengine.core.spec_stats import DepthChoice, SpecStats
from specengine.core.spec_totals import SpecTotals
from specengine.engine.outputs import EngineStats, RequestOutput, RequestTimes
from specengine.server.metrics import ServerMetrics
from specengine.server.metrics_names import VLLM

Values = dict[tuple[str, ...], float]


def full_stats(**more: Any) -> EngineStats:
    spec = SpecTotals()
    spec.record(4, [3, 3, 1], [2, 3, 0])
    return EngineStats(
        num_running=2,
        num_waiting=1,
        num_slots=100,
        num_free_slots=75,
        num_prompt_tokens=40,
        num_cached_tokens=10,
        num_generated_tokens=7,
        num_retractions=1,
        num_aborts=5,
        spec=spec,
        depth=DepthChoice(2, "batch 64: K=2, 1.34x of none; acceptance 0.71 0.55", 1.34, 6),
        model_name="small",
        algorithm="EAGLE3",
        **more,
    )


def finished(times: RequestTimes, kind: str = "stop") -> RequestOutput:
    reason = FinishReason(kind)
    given: tuple[Any, ...] = ([7, 8, 9], [7, 8, 9], "abc", "abc", reason, [], [], [], 3, 0)
    return RequestOutput("rid", 0, *given, SpecStats(), times)


def values_of(metrics: ServerMetrics) -> Values:
    """By name without our prefix, then `label=value` of each label."""
    return {
        (
            sample.name.removeprefix("specengine:"),
            *sorted(f"{key}={value}" for key, value in sample.labels.items()),
        ): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def test_model_and_algorithm_are_labels() -> None:
    metrics = ServerMetrics(full_stats)
    metrics.http.labels("/health", "200").inc()
    values = values_of(metrics)
    assert values["num_requests_running", "model_name=small"] == 2
    assert values["request_aborts_total", "model_name=small"] == 5
    labels = ("algorithm=EAGLE3", "model_name=small")
    assert values["spec_decode_num_rounds_total", *labels] == 4
    assert values["speculative_num_steps", *labels] == 2
    assert values["http_requests_total", "path=/health", "status=200"] == 1


def test_labels_stay_when_the_engine_has_failed() -> None:
    given: list[EngineStats | None] = [full_stats(), None]
    metrics = ServerMetrics(lambda: given.pop(0))
    metrics.observe(finished(RequestTimes(1.0, 1.5, 3.0, 1.2)))
    key = ("request_choices_total", "finish_reason=stop", "model_name=small")
    assert values_of(metrics)[key] == values_of(metrics)[key] == 1


def test_positions_count_drafted_and_accepted_tokens() -> None:
    values = values_of(ServerMetrics(full_stats))
    for kind, counts in {"draft": [3, 2, 2], "accepted": [2, 2, 1]}.items():
        name = f"spec_decode_num_{kind}_tokens_per_pos_total"
        labels = ("algorithm=EAGLE3", "model_name=small")
        found = [values[name, *labels, f"position={place}"] for place in range(3)]
        assert found == counts
        assert sum(counts) == values[f"spec_decode_num_{kind}_tokens_total", *labels]


def test_trees_have_no_drafted_tokens_by_position() -> None:
    names = {key[0] for key in values_of(ServerMetrics(lambda: full_stats(drafts_trees=True)))}
    assert "spec_decode_num_accepted_tokens_per_pos_total" in names
    assert "spec_decode_num_draft_tokens_per_pos_total" not in names


def test_queue_time_is_counted_even_without_a_first_token() -> None:
    metrics = ServerMetrics(lambda: None)
    metrics.observe(finished(RequestTimes(1.0, 1.5, 3.0, 1.25)))
    metrics.observe(finished(RequestTimes(1.0, None, 3.0, 1.5)))
    metrics.observe(finished(RequestTimes(1.0)))
    values = values_of(metrics)
    assert values["queue_time_seconds_sum",] == pytest.approx(0.75)
    assert values["queue_time_seconds_count",] == 2


def test_vllm_names_repeat_our_figures() -> None:
    plain, both = ServerMetrics(full_stats), ServerMetrics(full_stats, "vllm")
    for metrics in (plain, both):
        metrics.observe(finished(RequestTimes(1.0, 1.5, 3.0, 1.25)))
    values, more = values_of(plain), values_of(both)
    times = {key for key in more if key[0].endswith("_created")}
    assert {key: value for key, value in more.items() if key in values and key not in times} == {
        key: value for key, value in values.items() if key not in times
    }
    assert more["vllm:request_queue_time_seconds_sum", "model_name=small"] == 0.25
    assert more["vllm:request_success_total", "finished_reason=stop", "model_name=small"] == 1
    assert more["vllm:kv_cache_usage_perc", "model_name=small"] == 0.25
    key = ("algorithm=EAGLE3", "model_name=small", "position=2")
    assert more["vllm:spec_decode_num_accepted_tokens_per_pos_total", *key] == 1
    families = {name.removeprefix("vllm:") for name, *_ in set(more) - set(values)}
    assert all(any(name.startswith(known) for known in VLLM) for name in families)
    for theirs in VLLM:
        assert any(name.startswith(theirs) for name in families), (
            f"{theirs} is renamed from nothing"
        )
