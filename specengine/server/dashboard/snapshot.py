"""What the dashboard shows, read from the text of /metrics."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from specengine.core.version import __version__
from specengine.server.metrics_names import PREFIX

VALUES = (
    *("num_requests_running", "num_requests_waiting", "kv_slots", "kv_usage_ratio"),
    *("prefix_cache_hit_ratio", "prompt_tokens", "generation_tokens", "request_aborts"),
    *("request_retractions", "spec_decode_num_rounds", "spec_decode_num_drafts"),
    *("spec_decode_num_accepted_tokens", "spec_decode_mean_acceptance_length"),
    *("speculative_num_steps", "speculative_num_nodes", "speculative_gain"),
)
HISTOGRAMS = (
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "queue_time_seconds"),
    "e2e_request_latency_seconds",
)


def snapshot(text: str) -> dict[str, Any]:
    """values: counters since start and gauges, by name, as far as there are any. histograms: the
    upper bounds of buckets in seconds, and how many were at most that long; the last count, without
    a bound, is of all. accepted_per_pos: drafted tokens accepted by place. choice: why that depth
    was chosen."""
    families = {
        family.name.removeprefix(PREFIX): family for family in text_string_to_metric_families(text)
    }
    values = {name: families[name].samples[0].value for name in VALUES if name in families}
    accepted = families.get("spec_decode_num_accepted_tokens_per_pos")
    return {
        "time": time.time(),
        "version": __version__,
        "model": _label(families.get("num_requests_running"), "model_name"),
        "algorithm": _label(families.get("spec_decode_num_rounds"), "algorithm"),
        "values": values,
        "finished": _by_label(families.get("request_choices"), "finish_reason"),
        "accepted_per_pos": [*_by_label(accepted, "position").values()],
        "choice": _label(families.get("speculative_choice_info"), "reason"),
        "histograms": {name: _histogram(families[name]) for name in HISTOGRAMS if name in families},
    }


def _counts(family: Metric | None) -> Iterable[Any]:
    samples = [] if family is None else family.samples
    return (sample for sample in samples if not sample.name.endswith("_created"))


def _label(family: Metric | None, name: str) -> str | None:
    return next((sample.labels.get(name) for sample in _counts(family)), None)


def _by_label(family: Metric | None, name: str) -> dict[str, float]:
    return {sample.labels[name]: sample.value for sample in _counts(family)}


def _histogram(family: Metric) -> dict[str, list[float]]:
    buckets = [sample for sample in family.samples if sample.name.endswith("_bucket")]
    bounds = [float(sample.labels["le"]) for sample in buckets]
    finite = [bound for bound in bounds if math.isfinite(bound)]
    return {"bounds": finite, "counts": [sample.value for sample in buckets]}
