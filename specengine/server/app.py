"""The routes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from specengine.core.config import ServerConfig
from specengine.core.version import __version__
from specengine.engine.chat_template import chat_text
from specengine.engine.detokenizer import IncrementalDecoder
from specengine.engine.tokens import encode_text
from specengine.server.admin import ADMIN_PATHS, RequireAdmin, add_admin
from specengine.server.body import BodyReader, LimitedRoute
from specengine.server.bounds import check_rendered
from specengine.server.chat import chat_job
from specengine.server.chat_plan import template_turns
from specengine.server.completions import CompletionShape, completion_job
from specengine.server.dashboard.routes import add_dashboard
from specengine.server.dialect import dialect_of
from specengine.server.embeddings import EmbeddingRequest, embed
from specengine.server.errors import ApiError, install_error_handlers, json_response
from specengine.server.generation import ChoicesAnswer, Run, respond
from specengine.server.middleware import CatchErrors, CountResponses, RequireKey
from specengine.server.native.answer import NativeAnswer, native_job
from specengine.server.native.fields import NativeRequest
from specengine.server.operation import allow_origins, open_paths
from specengine.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from specengine.server.request_log import RequestLog, label_of
from specengine.server.responses.answer import ResponsesAnswer, responses_job
from specengine.server.responses.fields import ResponsesRequest
from specengine.server.service import Service
from specengine.server.streaming import until_disconnect
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
    # The pages that FastAPI has for people run scripts of other hosts, beside the dashboard's key.
    app = FastAPI(title="specengine", version=__version__, docs_url=None, redoc_url=None)
    app.router.route_class = LimitedRoute
    app.state.service, app.state.bodies = service, BodyReader(service.limits)
    _add_generation(app, service)  # first: a path is compared with one route after the other
    _add_probes(app, service)
    _add_models(app, service)
    _add_tokens(app, service)
    add_admin(app, service)
    if config.dashboard:
        add_dashboard(app, service)
    install_error_handlers(app)
    app.add_middleware(CatchErrors)
    app.add_middleware(RequireAdmin, key=config.admin_api_key)
    if keys:
        app.add_middleware(RequireKey, keys=keys, open_paths=open_paths(config) | ADMIN_PATHS)
    allow_origins(app, config)
    paths = frozenset(path for route in app.routes if (path := getattr(route, "path", None)))
    app.add_middleware(CountResponses, counter=service.metrics.http, paths=paths)
    if tracing is not None:
        app.add_middleware(TraceRequests, provider=tracing)
    app.add_middleware(RequestLog)
    return app


def _add_probes(app: FastAPI, service: Service) -> None:
    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        """Whether the process is worth keeping: 503 once the engine has failed."""
        is_alive = service.engine is None or service.engine.is_ready
        return json_response({"status": "ok" if is_alive else "failed"}, 200 if is_alive else 503)

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready")
    async def ready() -> Response:
        """Whether requests are served: 503 while the model loads, and after SIGTERM."""
        service.require()
        return json_response({"status": "ready"})

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
        return json_response({"object": "list", "data": [card(name) for name in names]})

    @app.get("/model_info")
    @app.get("/get_model_info", operation_id="model_info_by_its_older_name")
    async def model_info() -> Response:
        """What sglang-router asks a worker for."""
        engine = service.require()
        model = engine.config.model
        return json_response(
            {
                "model_path": model.model,
                "tokenizer_path": model.model,
                "served_model_name": service.names(engine)[0],
                "is_generation": not engine.is_embedding,
                "max_model_len": engine.context_length,
                "sampling_defaults": engine.sampling_defaults,
            }
        )

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return json_response(card(name))


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        engine = service.require_generator(body.model)
        job, shape = await chat_job(engine, body, label_of(request))
        run = Run(job, service, request)
        answer = ChoicesAnswer(run, shape, body.streaming, bool(body.return_token_ids))
        return await respond(request, answer, bool(body.stream))

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        engine = service.require_generator(body.model)
        job = await completion_job(engine, body, label_of(request))
        run, shape = Run(job, service, request), CompletionShape(job, body)
        answer = ChoicesAnswer(run, shape, body.streaming, bool(body.return_token_ids))
        return await respond(request, answer, bool(body.stream))

    @app.post("/v1/responses")
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        engine = service.require_generator(body.model)
        job, writer = await responses_job(engine, body, label_of(request))
        answer = ResponsesAnswer(Run(job, service, request), body, writer)
        return await respond(request, answer, bool(body.stream), last_event=b"")

    @app.post("/generate")
    async def generate(body: NativeRequest, request: Request) -> Response:
        job = await native_job(service.require_generator(body.model), body, label_of(request))
        answer = NativeAnswer(Run(job, service, request), body)
        return await respond(request, answer, bool(body.stream))

    @app.post("/v1/embeddings")
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        engine = service.require_embedder(body.model)
        work = embed(engine, body, request)
        answer = await until_disconnect(request.receive, work)
        return Response(status_code=499) if answer is None else json_response(answer)


def _add_tokens(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize")
    def tokenize(body: TokenizeRequest) -> Response:
        engine = service.require(body.model)
        if body.messages is not None:
            dialect = dialect_of(engine.tokenizer, engine.config.server)
            text = chat_text(engine.tokenizer, template_turns(dialect, body.messages))
            check_rendered(text, service.limits, engine.context_length)
            ids = encode_text(engine.tokenizer, text, False, "messages")
        else:
            ids = encode_text(engine.tokenizer, body.prompt or "", body.add_special_tokens)
        return json_response(
            {"tokens": ids, "count": len(ids), "max_model_len": engine.context_length}
        )

    @app.post("/detokenize")
    def detokenize(body: DetokenizeRequest) -> Response:
        engine = service.require(body.model)
        size = len(engine.tokenizer)
        if body.tokens and not 0 <= min(body.tokens) <= max(body.tokens) < size:
            raise ApiError(400, f"tokens must lie in 0..{size - 1}", "tokens")
        decoder = IncrementalDecoder(engine.tokenizer, body.skip_special_tokens)
        return json_response({"prompt": decoder.add(body.tokens, final=True)})
