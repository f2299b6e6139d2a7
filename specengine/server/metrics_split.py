"""Metrics of prompts that run a few layers at a time beside rounds (--enable-pdmux)."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric

from specengine.engine.outputs import SplitStats
from specengine.server.metrics_names import PREFIX, families

_PREFIX = PREFIX + "split_prefill_"


def split_metrics(stats: SplitStats) -> Iterable[Metric]:
    values: dict[str, tuple[str, float]] = {
        "forwards": ("Forwards of prompts that were split by layers", stats.num_prefills),
        "prompts": ("Prompts in them, a chunk of one counting as one", stats.num_prompts),
        "calls": ("Calls that ran some of their layers", stats.num_calls),
        "turns": ("Calls on all SMs, in turns with rounds", stats.num_turns),
        "layers": ("Layers that these ran", stats.num_layers),
        "left": ("Prompts aborted or retracted amid such a forward", stats.num_left),
        "rounds_on_all_sms": (
            "Rounds beside them that had no graph for the SMs that they leave",
            stats.num_rounds_on_all,
        ),
    }
    yield from families(CounterMetricFamily, _PREFIX, values)
    text = "Forwards of prompts under way beside rounds"
    yield GaugeMetricFamily(_PREFIX + "under_way", text, value=stats.num_under_way)
    family = CounterMetricFamily(
        _PREFIX + "fallbacks",
        "Forwards that were given no SMs of their own, by reason",
        labels=["reason"],
    )
    for reason, count in stats.fallbacks.items():
        family.add_metric([reason], count)
    yield family
    yield from _decision(stats)


def _decision(stats: SplitStats) -> Iterable[Metric]:
    """The reason is a label: it changes between scrapes."""
    decision = stats.decision
    if decision is None:
        return
    text = "Layers of the last call, as chosen by cost"
    yield GaugeMetricFamily(_PREFIX + "layers_a_call", text, value=decision.layers)
    text = "Share of the SMs of the last call, as chosen by cost"
    share = 1.0 if decision.share is None else decision.share
    yield GaugeMetricFamily(_PREFIX + "sm_share", text, value=share)
    text = "Why this share and these layers"
    yield InfoMetricFamily(_PREFIX + "choice", text, value={"reason": decision.reason})
