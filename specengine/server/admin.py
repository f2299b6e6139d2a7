"""What an operator asks of a running server: needs the key of --admin-api-key."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import FastAPI, Query, Request
from pydantic import Field, model_validator
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from specengine.core.config_sources import shown
from specengine.core.errors import RequestError
from specengine.core.version import __version__
from specengine.server.errors import ApiError, json_response
from specengine.server.middleware import RequireKey
from specengine.server.service import Service
from specengine.server.strict import Strict

SLEEP_PATHS = ("/sleep", "/release_memory_occupation")  # vLLM's name, and SGLang's
WAKE_PATHS = ("/wake_up", "/resume_memory_occupation")
ADMIN_PATHS = frozenset(
    {"/server_info", "/flush_cache", "/abort_request", "/update_weights_from_disk"}
    | {*SLEEP_PATHS, *WAKE_PATHS, "/is_sleeping"}
)
# What answers put before the id of a job.
_PREFIXES = ("cmpl-", "chatcmpl-", "resp_")


class AbortRequest(Strict):
    """rid: of /generate, the id of an answer, or a request's X-Request-Id."""

    rid: str | None = Field(default=None, max_length=256)
    abort_all: bool | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> AbortRequest:
        if (self.rid is None) == (not self.abort_all):
            raise RequestError("give either rid, or abort_all as true", "rid")
        return self

    @property
    def names(self) -> list[str] | None:
        """None is all."""
        if self.rid is None:
            return None
        return [self.rid, *(self.rid.removeprefix(one) for one in _PREFIXES)]


class UpdateWeights(Strict):
    """What `--model` and `--speculative-draft-model-path` could name, on the server's host."""

    model_path: str | None = Field(default=None, min_length=1, max_length=4096)
    draft_model_path: str | None = Field(default=None, min_length=1, max_length=4096)

    @model_validator(mode="after")
    def _at_least_one(self) -> UpdateWeights:
        if self.model_path is None and self.draft_model_path is None:
            raise RequestError("give model_path, draft_model_path or both", "model_path")
        return self


class RequireAdmin:
    """The paths of this file want `Authorization: Bearer KEY` with the operator's key, and are
    closed where there is none."""

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self._app = app
        self._guarded = None if key is None else RequireKey(app, [key])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in ADMIN_PATHS:
            await self._app(scope, receive, send)
        elif self._guarded is not None:
            await self._guarded(scope, receive, send)
        else:
            message = f"{scope['path']} needs a server that was started with --admin-api-key"
            error = ApiError(403, message, code="no_admin_key")
            await error.response()(scope, receive, send)


def add_admin(app: FastAPI, service: Service) -> None:
    _add_sleep(app, service)

    @app.get("/server_info")
    async def server_info() -> Response:
        """Version, configuration (without keys) and the engine's counters."""
        engine = service.require()
        await engine.refresh()
        stats = engine.stats()
        return json_response(
            {
                "version": __version__,
                "model_name": engine.model_name,
                # Where sglang-router looks for the name that requests give.
                "served_model_name": service.names(engine)[0],
                "model_path": engine.config.model.model,
                "tokenizer_path": engine.config.model.model,
                "served_model_names": service.names(engine),
                "context_length": engine.context_length,
                "config": shown(engine.config),
                "state": asdict(stats),
                # Where SGLang's benchmarks look for the accepted length.
                "internal_states": [{"avg_spec_accept_length": stats.spec.mean_acceptance_length}],
            }
        )

    @app.get("/flush_cache", operation_id="flush_cache_by_get")
    @app.post("/flush_cache")
    async def flush_cache() -> Response:
        """Forget the KV of prefixes that no request holds."""
        return json_response({"num_tokens": await service.require().flush_cache()})

    @app.post("/abort_request")
    async def abort_request(body: AbortRequest) -> Response:
        """End requests. Their clients get a 503, or what there is of a /generate."""
        return json_response({"num_requests": await service.require().give_up(body.names)})

    @app.post("/update_weights_from_disk")
    async def update_weights_from_disk(body: UpdateWeights) -> Response:
        """Other weights for the model, its drafter or both, all or nothing. Requests wait while
        they are read, and unfinished ones go on with the new weights."""
        engine = service.require()
        tokens = await engine.update_weights(body.model_path, body.draft_model_path)
        return json_response({"success": True, "num_forgotten_tokens": tokens})


def _add_sleep(app: FastAPI, service: Service) -> None:
    @app.post(SLEEP_PATHS[0])
    @app.post(SLEEP_PATHS[1], operation_id="sleep_by_another_name")
    async def sleep(request: Request, level: int = Query(default=1, ge=1, le=2)) -> Response:
        """Give the memory of weights and KV back. level: 1 keeps the weights, 2 reads them again at
        the end. Unfinished requests wait; new ones get a 503."""
        await _refuse_fields(request, {"level"})
        num_bytes = await service.require().sleep(level)
        return json_response({"is_sleeping": True, "num_bytes": num_bytes})

    @app.post(WAKE_PATHS[0])
    @app.post(WAKE_PATHS[1], operation_id="wake_up_by_another_name")
    async def wake_up(request: Request) -> Response:
        """Take the memory again, all of it."""
        await _refuse_fields(request, set())
        await service.require().wake()
        return json_response({"is_sleeping": False})

    @app.get("/is_sleeping")
    async def is_sleeping() -> Response:
        return json_response({"is_sleeping": await service.require().is_sleeping()})


async def _refuse_fields(request: Request, known: set[str]) -> None:
    """Raises RequestError for a body, and for other parameters than the known ones."""
    others = request.query_params.keys() - known
    if others or await request.body() not in (b"", b"{}"):
        name = min(others, default="body")
        raise RequestError(f"{name}: all memory is given back, and taken again, together", name)
