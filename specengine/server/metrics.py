"""Prometheus metrics, computed from what ran."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from specengine.core.spec_stats import DepthChoice
from specengine.engine.outputs import EngineStats, RequestOutput
from specengine.server.metrics_names import PREFIX, LabelledCollector, RenamedCollector, families
from specengine.server.metrics_shared import shared
from specengine.server.metrics_split import split_metrics

_QUEUED = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_FIRST_TOKEN = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_WHOLE = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_ONE_TOKEN = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)

Stats = Callable[[], EngineStats | None]


class ServerMetrics:
    """Counts finished choices, and reads the engine's own counters when asked.

    compatible: a key of COMPATIBLE, for the metrics under those names as well.
    """

    def __init__(self, stats: Stats, compatible: str | None = None) -> None:
        self.compatible = compatible
        self._stats = stats
        self._model: dict[str, str] = {}  # as last seen: it stays when the engine fails
        self._algorithm: dict[str, str] = {}
        self._http = CollectorRegistry()
        self._registry = registry = CollectorRegistry()
        self.http = Counter(
            PREFIX + "http_requests", "HTTP responses", ["path", "status"], registry=self._http
        )
        self._finished = Counter(
            PREFIX + "request_choices",
            "Finished choices (n of a request)",
            ["finish_reason"],
            registry=registry,
        )
        self._first_token = Histogram(
            PREFIX + "time_to_first_token_seconds",
            "From arrival to the first token",
            buckets=_FIRST_TOKEN,
            registry=registry,
        )
        self._whole = Histogram(
            PREFIX + "e2e_request_latency_seconds",
            "From arrival to the last token",
            buckets=_WHOLE,
            registry=registry,
        )
        self._one_token = Histogram(
            PREFIX + "inter_token_latency_seconds",
            "Seconds a token after the first, mean over a choice",
            buckets=_ONE_TOKEN,
            registry=registry,
        )
        self._queued = Histogram(
            PREFIX + "queue_time_seconds",
            "From arrival to the first forward of the prompt",
            buckets=_QUEUED,
            registry=registry,
        )

    def observe(self, output: RequestOutput) -> None:
        """Count a choice that has finished."""
        assert output.finish_reason is not None
        self._finished.labels(output.finish_reason.kind).inc()
        times = output.times
        if times.admitted is not None:
            self._queued.observe(times.admitted - times.arrival)
        if times.first_token is None or times.finish is None:
            return
        self._first_token.observe(times.first_token - times.arrival)
        self._whole.observe(times.finish - times.arrival)
        if len(output.token_ids) > 1:
            self._one_token.observe(
                (times.finish - times.first_token) / (len(output.token_ids) - 1)
            )

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        stats = self._stats()
        engine = CollectorRegistry()
        if stats is not None:
            engine.register(EngineCollector(stats))
            self._model = {"model_name": stats.model_name} if stats.model_name else {}
            self._algorithm = {"algorithm": stats.algorithm} if stats.algorithm else {}
        counted = (shared(self._registry), engine)
        parts = [LabelledCollector(one, self._labels) for one in counted]
        joined: Collector = JoinedCollector([shared(self._http), *parts])
        if self.compatible is not None:
            joined = RenamedCollector(joined, self.compatible)
        return generate_latest(joined)

    def _labels(self, family: Metric) -> dict[str, str]:
        speculates = family.name.startswith((PREFIX + "spec_decode_", PREFIX + "speculative_"))
        return self._model | self._algorithm if speculates else self._model


class JoinedCollector(Collector):
    """What several collect."""

    def __init__(self, parts: Sequence[Collector]) -> None:
        self._parts = parts

    def collect(self) -> Iterable[Metric]:
        for part in self._parts:
            yield from part.collect()


class EngineCollector(Collector):
    """The engine's counters."""

    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        stats = self._stats
        yield from _gauges(stats)
        yield from _counters(stats)
        yield from _by_position(stats)
        yield from _graphs(stats)
        yield from _snapshots(stats)
        if stats.split is not None:
            yield from split_metrics(stats.split)
        if stats.depth is not None:
            yield from _depth(stats.depth)

    def describe(self) -> Iterable[Metric]:
        return ()


def _gauges(stats: EngineStats) -> Iterable[Metric]:
    values: dict[str, tuple[str, float]] = {
        "num_requests_running": ("Requests being decoded", stats.num_running),
        "num_requests_waiting": ("Requests in the queue", stats.num_waiting),
        "kv_slots": ("KV slots", stats.num_slots),
        "kv_usage_ratio": ("Share of the KV slots that requests hold", stats.kv_usage),
        "prefix_cache_hit_ratio": ("Prompt tokens found cached", stats.prefix_hit_rate),
        "spec_decode_mean_acceptance_length": (
            "Tokens a round, bonus token included: 1 + accepted / rounds, over all rounds",
            stats.spec.mean_acceptance_length,
        ),
    }
    yield from families(GaugeMetricFamily, PREFIX, values)


def _counters(stats: EngineStats) -> Iterable[Metric]:
    spec = stats.spec
    values: dict[str, tuple[str, float]] = {
        "prompt_tokens": ("Prompt tokens taken in", stats.num_prompt_tokens),
        "prefix_cache_hit_tokens": ("Prompt tokens found cached", stats.num_cached_tokens),
        "generation_tokens": ("Tokens generated", stats.num_generated_tokens),
        "request_retractions": ("Requests sent back to the queue", stats.num_retractions),
        "request_aborts": (
            "Choices that did not finish: their client left, or they were given up",
            stats.num_aborts,
        ),
        "graph_forwards": ("Forwards replayed from a graph", stats.num_graph_forwards),
        "eager_forwards": ("Forwards run eagerly", stats.num_eager_forwards),
        "spec_decode_num_rounds": ("Rounds, one a request, drafted or not", spec.num_rounds),
        "spec_decode_num_drafts": (
            "Rounds that had a draft to verify; accepted length counts the others as well",
            spec.num_drafts,
        ),
        "spec_decode_num_draft_tokens": ("Tokens drafted", spec.num_draft_tokens),
        "spec_decode_num_accepted_tokens": (
            "Drafted tokens accepted, without bonus tokens",
            spec.num_accepted_tokens,
        ),
    }
    yield from families(CounterMetricFamily, PREFIX, values)


def _snapshots(stats: EngineStats) -> Iterable[Metric]:
    """Metrics of snapshots, which targets with recurrent state have."""
    if stats.num_state_snapshots is not None:
        text = "Snapshots of recurrent state in the prefix cache"
        yield GaugeMetricFamily(PREFIX + "state_snapshots", text, value=stats.num_state_snapshots)
        text = "Snapshots evicted for newer ones"
        name, count = PREFIX + "state_snapshot_evictions", stats.num_evicted_snapshots
        yield CounterMetricFamily(name, text, value=count)


def _depth(depth: DepthChoice) -> Iterable[Metric]:
    """The reason is a label: it changes between scrapes."""
    name = PREFIX + "speculative_num_steps"
    yield GaugeMetricFamily(name, "Depth of drafts, as chosen by cost", value=depth.num_steps)
    if depth.num_nodes is not None:
        text = "Nodes that trees are cut to, as chosen by cost"
        yield GaugeMetricFamily(PREFIX + "speculative_num_nodes", text, value=depth.num_nodes)
    if depth.expected_gain is not None:
        text = "Tokens a second at that depth, over those without drafts"
        yield GaugeMetricFamily(PREFIX + "speculative_gain", text, value=depth.expected_gain)
    yield InfoMetricFamily(
        PREFIX + "speculative_choice", "Why this depth", value={"reason": depth.reason}
    )


def _by_position(stats: EngineStats) -> Iterable[Metric]:
    """The drafted ones of chains only: the nodes of trees are not counted by their depth."""
    counts = {"accepted": stats.spec.accepted_per_pos}
    if not stats.drafts_trees:
        counts["draft"] = stats.spec.drafted_per_pos
    what = {"accepted": "Drafted tokens accepted", "draft": "Tokens drafted, in chains"}
    for kind, values in counts.items():
        family = CounterMetricFamily(
            f"{PREFIX}spec_decode_num_{kind}_tokens_per_pos",
            f"{what[kind]}, by their place in the draft (0 is the first)",
            labels=["position"],
        )
        for position, count in enumerate(values):
            family.add_metric([str(position)], count)
        yield family


def _graphs(stats: EngineStats) -> Iterable[Metric]:
    captures, replays, fallbacks = (
        CounterMetricFamily(PREFIX + "graph_captures", "CUDA graphs captured", labels=["graph"]),
        CounterMetricFamily(PREFIX + "graph_replays", "CUDA graphs replayed", labels=["graph"]),
        CounterMetricFamily(
            PREFIX + "graph_fallbacks",
            "Batches that no graph of this kind served, by reason",
            labels=["graph", "reason"],
        ),
    )
    for kind, one in stats.graphs.items():
        captures.add_metric([kind], one.captures)
        replays.add_metric([kind], one.replays)
        for reason, count in one.fallbacks.items():
            fallbacks.add_metric([kind, reason], count)
    return captures, replays, fallbacks
