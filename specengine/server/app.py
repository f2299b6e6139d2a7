"""The routes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from fastapi import FastAPI, Request
from starlette.responses import Response

from specengine.core.config import ServerConfig
from specengine.core.version import __version__
from specengine.engine.chat_template import render_chat
from specengine.engine.detokenizer import IncrementalDecoder
from specengine.engine.tokens import encode_text
from specengine.server.body import BodyReader, LimitedRoute
from specengine.server.chat import chat_job
from specengine.server.completions import CompletionShape, completion_job
from specengine.server.dashboard.routes import add_dashboard
from specengine.server.errors import ApiError, install_error_handlers
from specengine.server.generation import respond
from specengine.server.middleware import CatchErrors, CountResponses, RequireKey
from specengine.server.operation import allow_origins, open_paths
from specengine.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from specengine.server.request_log import RequestLog
from specengine.server.service import Service
from specengine.server.tracing import TraceRequests


def create_app(
    service: Service,
    keys: Sequence[str] = (),
    config: ServerConfig | None = None,
    tracing: Any = None,
) -> FastAPI:
    """The ASGI application; it answers 503 until `service` has its engine. With `keys`, requests
    need one of them. tracing: OpenTelemetry's TracerProvider, for a span a request."""
    config = config or ServerConfig()
    service.metrics.compatible = config.metrics_compat
    app = FastAPI(title="specengine", version=__version__)
    app.router.route_class = LimitedRoute
    app.state.service, app.state.bodies = service, BodyReader(service.limits)
    _add_probes(app, service)
    _add_models(app, service)
    _add_generation(app, service)
    _add_tokens(app, service)
    if config.dashboard:
        add_dashboard(app, service)
    install_error_handlers(app)
    app.add_middleware(CatchErrors)
    if keys:
        app.add_middleware(RequireKey, keys=keys, open_paths=open_paths(config))
    allow_origins(app, config)
    paths = frozenset(path for route in app.routes if (path := getattr(route, "path", None)))
    app.add_middleware(CountResponses, counter=service.metrics.http, paths=paths)
    if tracing is not None:
        app.add_middleware(TraceRequests, provider=tracing)
    app.add_middleware(RequestLog)
    return app


def _json(payload: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(payload), status, media_type="application/json")


def _add_probes(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> Response:
        """Whether the process is worth keeping: 503 once the engine has failed."""
        is_alive = service.engine is None or service.engine.is_ready
        return _json({"status": "ok" if is_alive else "failed"}, 200 if is_alive else 503)

    @app.get("/ready")
    async def ready() -> Response:
        """Whether requests are served: 503 while the model loads, and after SIGTERM."""
        service.require()
        return _json({"status": "ready"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await service.render_metrics(), media_type="text/plain; version=0.0.4")


def _add_models(app: FastAPI, service: Service) -> None:
    def card(name: str) -> dict[str, Any]:
        engine = service.require(name)
        return {
            "id": name,
            "object": "model",
            "created": service.started,
            "owned_by": "specengine",
            "max_model_len": engine.context_length,
        }

    @app.get("/v1/models")
    async def models() -> Response:
        names = service.names(service.require())
        return _json({"object": "list", "data": [card(name) for name in names]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return _json(card(name))


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        job, shape = await chat_job(service.require(body.model), body)
        return await respond(service, request, job, shape, body.streaming)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        job = await completion_job(service.require(body.model), body)
        shape = CompletionShape(job, body)
        return await respond(service, request, job, shape, body.streaming)


def _add_tokens(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize")
    def tokenize(body: TokenizeRequest) -> Response:
        engine = service.require(body.model)
        if body.messages is not None:
            turns = [message.for_template() for message in body.messages]
            ids = render_chat(engine.tokenizer, turns)
        else:
            ids = encode_text(engine.tokenizer, body.prompt or "", body.add_special_tokens)
        return _json({"tokens": ids, "count": len(ids), "max_model_len": engine.context_length})

    @app.post("/detokenize")
    def detokenize(body: DetokenizeRequest) -> Response:
        engine = service.require(body.model)
        size = len(engine.tokenizer)
        if not all(0 <= token < size for token in body.tokens):
            raise ApiError(400, f"tokens must lie in 0..{size - 1}", "tokens")
        decoder = IncrementalDecoder(engine.tokenizer, body.skip_special_tokens)
        return _json({"prompt": decoder.add(body.tokens, final=True)})
