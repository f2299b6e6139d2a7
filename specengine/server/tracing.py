"""OpenTelemetry: a span a request, sent to a collector. Needs the extra `otel`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from specengine.core.errors import ConfigError
from specengine.core.version import __version__
from specengine.server.middleware import OPEN_PATHS, is_of_page
from specengine.server.request_log import RequestRecord, record_of


def otlp_provider(endpoint: str | None) -> Any:
    """An SDK TracerProvider that sends batches of spans to an OTLP/HTTP endpoint. Sampling and
    resource follow OpenTelemetry's own environment variables. Raises ConfigError where the extra is
    missing. None: nothing is traced."""
    if endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            "--otlp-endpoint needs OpenTelemetry: pip install 'specengine[otel]'"
        ) from error
    named = Resource({"service.name": "specengine", "service.version": __version__})
    told = Resource.create()  # OTEL_RESOURCE_ATTRIBUTES, OTEL_SERVICE_NAME
    is_named = not str(told.attributes.get("service.name", "")).startswith("unknown_service")
    provider = TracerProvider(resource=named.merge(told) if is_named else told.merge(named))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider


class TraceRequests:
    """A server span for each request but probes and pages, below the client's `traceparent`."""

    def __init__(self, app: ASGIApp, provider: Any) -> None:
        self._app = app
        self._tracer = provider.get_tracer("specengine.server", __version__)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or is_of_page(scope):
            await self._app(scope, receive, send)
            return
        with self._span(scope):
            await self._app(scope, receive, send)

    @contextmanager
    def _span(self, scope: Scope) -> Iterator[None]:
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        given = TraceContextTextMapPropagator().extract(dict(Headers(scope=scope)))
        record = record_of(scope)
        # Not the path of an unknown route: names of spans must be few.
        span = self._tracer.start_span(scope["method"], context=given, kind=SpanKind.SERVER)
        try:
            yield
        finally:
            route = getattr(scope.get("route"), "path", None)
            if route is not None:
                span.update_name(f"{scope['method']} {route}")
                span.set_attribute("http.route", route)
            span.set_attribute("http.request.method", scope["method"])
            span.set_attribute("url.path", scope["path"])
            span.set_attributes(_attributes(record))
            if record.error is not None and (record.status is None or record.status < 400):
                span.set_status(Status(StatusCode.ERROR, "the stream ended with an error"))
            elif record.status is not None and record.status >= 500:
                span.set_status(Status(StatusCode.ERROR))
            span.end()


def _attributes(record: RequestRecord) -> dict[str, Any]:
    """Conventional names where there are any. What does not apply is left out."""
    found: dict[str, Any] = {
        "http.response.status_code": record.status,
        "specengine.request_id": record.id,
        "specengine.abandoned": record.is_abandoned or None,
        "gen_ai.usage.input_tokens": record.prompt_tokens or None,
    }
    if record.completion_tokens:
        found |= {
            "gen_ai.usage.output_tokens": record.completion_tokens,
            "gen_ai.server.time_to_first_token": record.first_token,
        }
    if record.spec.num_rounds:
        found |= {
            "specengine.accepted_length": record.spec.mean_acceptance_length,
            "specengine.num_rounds": record.spec.num_rounds,
            "specengine.num_draft_tokens": record.spec.num_draft_tokens,
            "specengine.num_accepted_tokens": record.spec.num_accepted,
        }
    if record.error is not None:
        found["error.type"] = record.error.get("code") or record.error.get("type")
        found["specengine.error_message"] = record.error.get("message")
    return {name: value for name, value in found.items() if value is not None}
