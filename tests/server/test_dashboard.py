"""The dashboard: its page, what feeds it, who may see it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from specengine.core.config import ServerConfig
from specengine.server.app import create_app
from specengine.server.dashboard.snapshot import HISTOGRAMS, VALUES, snapshot
from specengine.server.metrics import ServerMetrics
from specengine.server.run import background_server
from specengine.server.service import Service
from tests.server.conftest import KEY, FakeEngine
from tests.server.test_metrics_of_operation import RequestTimes, finished, full_stats

BASIC = httpx.BasicAuth("anyone", KEY)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    service = Service()
    service.engine = FakeEngine()
    config = ServerConfig(port=0, log_level="warning")
    with background_server(create_app(service, [KEY], config), config) as url:
        yield url


def test_snapshot_has_every_figure_that_the_page_reads() -> None:
    metrics = ServerMetrics(full_stats)
    metrics.observe(finished(RequestTimes(1.0, 1.03, 3.0, 1.25)))
    found = snapshot(metrics.render().decode())
    assert (found["model"], found["algorithm"]) == ("small", "EAGLE3")
    assert set(found["values"]) == set(VALUES)
    assert found["values"]["generation_tokens"] == 7
    assert found["values"]["spec_decode_num_rounds"] == 4
    assert found["accepted_per_pos"] == [2, 2, 1]
    assert found["choice"] == "batch 64: K=2, 1.34x of none; acceptance 0.71 0.55"
    assert found["finished"] == {"stop": 1}
    assert set(found["histograms"]) == set(HISTOGRAMS)
    first = found["histograms"]["time_to_first_token_seconds"]
    assert first["bounds"][:4] == [0.005, 0.01, 0.025, 0.05]
    assert first["counts"][:4] == [0, 0, 0, 1]
    assert len(first["counts"]) == len(first["bounds"]) + 1


def test_snapshot_without_an_engine_has_no_values() -> None:
    found = snapshot(ServerMetrics(lambda: None).render().decode())
    assert (found["values"], found["model"], found["choice"]) == ({}, None, None)


def test_page_loads_only_what_the_server_has(url: str) -> None:
    page = httpx.get(url + "/dashboard", auth=BASIC)
    assert page.headers["content-type"].startswith("text/html")
    links = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert {link for link in links if not link.startswith("/dashboard/")} == {"data:,"}
    for link in (*links[1:], "/dashboard/uPlot.LICENSE"):
        answer = httpx.get(url + link, auth=BASIC)
        assert answer.status_code == 200, link
        assert answer.headers["content-security-policy"].startswith("default-src 'self'")
    assert "MIT" in answer.text


def test_page_reads_only_figures_of_the_snapshot(url: str) -> None:
    script = httpx.get(url + "/dashboard/charts.js", auth=BASIC).text
    named = set(re.findall(r"values\.(\w+)", script)) | {
        *re.findall(r'(?:rate|gained)\(\w+, \w+, "(\w+)"', script)
    }
    assert len(named) > 8
    assert named <= set(VALUES)
    drawn = set(re.findall(r'(?:percentiles\("[^"]+"|quantile\(\w, \w), "(\w+)"', script))
    assert drawn == set(HISTOGRAMS)


@pytest.mark.parametrize("path", ["/dashboard", "/dashboard/data", "/dashboard/charts.js"])
def test_pages_take_the_key_as_a_password(url: str, path: str) -> None:
    assert httpx.get(url + path, auth=BASIC).status_code == 200
    assert httpx.get(url + path, headers={"Authorization": f"Bearer {KEY}"}).status_code == 200
    for headers in ({}, {"Authorization": "Basic !"}, {"Authorization": "Basic"}):
        refused = httpx.get(url + path, headers=headers)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"].startswith("Basic")
    assert httpx.get(url + path, auth=("anyone", "wrong")).status_code == 401


def test_passwords_open_nothing_but_pages(url: str) -> None:
    for path in ("/v1/models", "/dashboardx"):
        refused = httpx.get(url + path, auth=BASIC)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"


def test_data_is_json_of_this_moment(url: str) -> None:
    answer = httpx.get(url + "/dashboard/data", auth=BASIC)
    assert answer.headers["cache-control"] == "no-store"
    found: dict[str, Any] = answer.json()
    assert found["values"]["num_requests_running"] == 2
    assert found["accepted_per_pos"] == [5, 4]


def test_no_dashboard_where_told() -> None:
    service = Service()
    config = ServerConfig(port=0, log_level="warning", dashboard=False)
    with background_server(create_app(service, (), config), config) as url:
        for path in ("", "/data", "/charts.js"):
            assert httpx.get(f"{url}/dashboard{path}").status_code == 404
