"""A span a request, as OpenTelemetry's in-memory exporter receives it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from specengine.core.config import ServerConfig
from specengine.core.errors import ConfigError
from specengine.server.app import create_app
from specengine.server.run import background_server
from specengine.server.service import Service
from specengine.server.tracing import otlp_provider
from tests.server.conftest import KEY, FakeEngine
from tests.support.waiting import until

trace = pytest.importorskip("opentelemetry.sdk.trace", reason="needs the extra otel")
TEXT = "/v1/completions"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@dataclass
class Traced:
    http: httpx.Client
    engine: FakeEngine
    exporter: Any

    def span(self) -> Any:
        """The one span so far: it ends after its answer."""
        until(self.exporter.get_finished_spans)
        (span,) = self.exporter.get_finished_spans()
        return span


@pytest.fixture
def traced() -> Iterator[Traced]:
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    provider, exporter, service = trace.TracerProvider(), InMemorySpanExporter(), Service()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    engine = service.engine = FakeEngine()
    config = ServerConfig(port=0, log_level="warning")
    headers = {"Authorization": f"Bearer {KEY}"}
    with (
        background_server(create_app(service, [KEY], config, provider), config) as url,
        httpx.Client(base_url=url, headers=headers) as http,
    ):
        yield Traced(http, engine, exporter)


@pytest.mark.parametrize("stream", [False, True])
def test_span_has_the_figures_of_its_answer(traced: Traced, stream: bool) -> None:
    body = {"model": "fake", "prompt": ["xx", "yyy"], "stream": stream, "max_tokens": 5}
    headers = {"X-Request-Id": "mine", "traceparent": PARENT}
    assert traced.http.post(TEXT, json=body, headers=headers).status_code == 200
    span = traced.span()
    assert span.name == f"POST {TEXT}"
    assert span.kind.name == "SERVER"
    assert format(span.context.trace_id, "032x") == PARENT.split("-")[1]
    assert format(span.parent.span_id, "016x") == PARENT.split("-")[2]
    found = dict(span.attributes)
    assert found.pop("specengine.accepted_length") > 1
    drafted, accepted = (
        found.pop(f"specengine.num_{kind}_tokens") for kind in ("draft", "accepted")
    )
    assert drafted > accepted > 0
    assert found.pop("specengine.num_rounds") > 0
    assert found.pop("gen_ai.server.time_to_first_token") == pytest.approx(0.1)
    assert found == {
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "http.route": TEXT,
        "url.path": TEXT,
        "specengine.request_id": "mine",
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 10,
    }
    assert span.status.status_code.name == "UNSET"
    assert span.end_time > span.start_time


def test_span_of_a_refusal_says_why(traced: Traced) -> None:
    traced.http.post(TEXT, json={"model": "fake", "prompt": "x", "stop": ["a"] * 17})
    span = traced.span()
    assert span.attributes["http.response.status_code"] == 400
    assert span.attributes["error.type"] == "limit_exceeded"
    assert span.status.status_code.name == "UNSET"  # the client's error, not the server's


@pytest.mark.parametrize(("stream", "status"), [(False, 500), (True, 200)])
def test_span_of_a_failure_is_an_error(traced: Traced, stream: bool, status: int) -> None:
    traced.engine.error, traced.engine.error_after = ZeroDivisionError("secret"), 1
    traced.http.post(TEXT, json={"model": "fake", "prompt": "x", "stream": stream})
    span = traced.span()
    assert span.attributes["http.response.status_code"] == status
    assert span.status.status_code.name == "ERROR"
    assert "secret" not in str(span.to_json())


def test_span_of_a_client_that_left_ends(traced: Traced) -> None:
    traced.engine.holds_after = 1
    body = {"model": "fake", "prompt": "x", "stream": True, "max_tokens": 190}
    with traced.http.stream("POST", TEXT, json=body) as response:
        next(response.iter_lines())
    assert traced.span().attributes["specengine.abandoned"] is True


def test_wrong_keys_and_unknown_routes_have_few_names_and_probes_none(traced: Traced) -> None:
    for path in ("/health", "/metrics", "/dashboard/data"):
        traced.http.get(path)
    traced.http.get("/v1/models", headers={"Authorization": "Bearer wrong"})
    traced.http.get("/no/such/route")
    until(lambda: len(traced.exporter.get_finished_spans()) == 2)
    spans = traced.exporter.get_finished_spans()
    assert [span.name for span in spans] == ["GET", "GET"]
    assert [span.attributes["http.response.status_code"] for span in spans] == [401, 404]


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert otlp_provider(None) is None
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"specengine\[otel\]"):
        otlp_provider("http://127.0.0.1:4318/v1/traces")


def test_exporter_has_the_service_as_its_resource(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra otel")
    for given, name in ((None, "specengine"), ("mine", "mine")):
        if given is not None:
            monkeypatch.setenv("OTEL_SERVICE_NAME", given)
        provider = otlp_provider("http://127.0.0.1:1/v1/traces")
        assert provider.resource.attributes["service.name"] == name
        provider.shutdown()
