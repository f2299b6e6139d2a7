"""deploy/grafana.json asks only for metrics and labels that the server has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families

from specengine.engine.outputs import RequestTimes
from specengine.runner.fallbacks import GraphStats
from specengine.server.metrics import ServerMetrics
from tests.server.test_metrics_of_operation import finished, full_stats

FILE = Path(__file__).parents[2] / "deploy" / "grafana.json"
OF_PROMETHEUS = {"instance", "job", "le"}


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads(FILE.read_bytes())
    return found


@pytest.fixture(scope="module")
def labels() -> dict[str, set[str]]:
    """Labels of each sample that the server may show."""
    graphs = {"round": GraphStats(captures=1, replays=2, fallbacks={"grammar": 3})}
    metrics = ServerMetrics(lambda: full_stats(graphs=graphs))
    metrics.http.labels("/health", "200").inc()
    metrics.observe(finished(RequestTimes(1.0, 1.5, 3.0, 1.25)))
    return {
        sample.name: set(sample.labels)
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def expressions(panel: dict[str, Any]) -> list[str]:
    return [target["expr"] for target in panel["targets"]]


def test_metrics_and_labels_exist(dashboard: dict[str, Any], labels: dict[str, set[str]]) -> None:
    asked: set[str] = set()
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            names = re.findall(r"specengine:\w+", target["expr"])
            assert names, panel["title"]
            asked |= set(names)
            assert set(names) <= set(labels), panel["title"]
            had = set.intersection(*(labels[name] for name in names)) | OF_PROMETHEUS
            grouped = re.findall(r"by \(([^)]*)\)", target["expr"])
            wanted = {one.strip() for group in grouped for one in group.split(",")}
            wanted |= set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            if "scalar(" in target["expr"]:
                had |= labels[names[0]]
            assert wanted <= had, panel["title"]
            selected = re.findall(r"(specengine:\w+){model_name", target["expr"])
            assert all("model_name" in labels[name] for name in selected), panel["title"]
    assert len(asked) > 15
    (model,) = [one for one in dashboard["templating"]["list"] if one["name"] == "model"]
    (name,) = re.findall(r"specengine:\w+", model["query"]["query"])
    assert "model_name" in labels[name]


def test_rates_are_of_counters_and_quantiles_of_buckets(dashboard: dict[str, Any]) -> None:
    for panel in dashboard["panels"]:
        for expression in expressions(panel):
            rated = re.findall(r"rate\((specengine:\w+)", expression)
            assert all(name.endswith(("_total", "_bucket")) for name in rated), panel["title"]
            others = set(re.findall(r"specengine:\w+", expression)) - set(rated)
            assert not any(name.endswith(("_total", "_bucket")) for name in others), panel["title"]
            assert ("histogram_quantile" in expression) == ("_bucket" in expression)


def test_panels_do_not_overlap(dashboard: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
