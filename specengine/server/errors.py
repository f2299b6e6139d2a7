"""Errors as OpenAI's clients expect them: {"error": {message, type, param, code}}."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from specengine.core.errors import (
    EngineAsleepError,
    EngineStoppedError,
    QueueFullError,
    RequestError,
    SpecEngineError,
)
from specengine.server.json_bytes import dumps

logger = logging.getLogger(__name__)

NO_OBJECT = "the body must be a JSON object, sent with Content-Type: application/json"
MOST_TOLD = 2000  # characters of what a client sent, in a message or a name of a field


@dataclass(eq=False)
class ApiError(Exception):
    """An error with its HTTP status. `param` names the field of the request that is wrong."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None

    @property
    def kind(self) -> str:
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> dict[str, Any]:
        error = {
            "message": _clipped(self.message),
            "type": self.kind,
            "param": None if self.param is None else _clipped(self.param),
            "code": self.code,
        }
        return {"error": error}

    def headers(self) -> dict[str, str]:
        named = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}}
        return named.get(self.status, {})

    def response(self) -> Response:
        content = dumps(self.body())
        return Response(content, self.status, self.headers(), media_type="application/json")


def _clipped(text: str) -> str:
    return text if len(text) <= MOST_TOLD else f"{text[:MOST_TOLD]} ..."


class BodyRefused(HTTPException):
    """FastAPI lets this kind of error alone pass while it reads a body."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.status, error.message)
        self.error = error


def json_response(payload: Any, status: int = 200) -> Response:
    return Response(dumps(payload), status, media_type="application/json")


def as_api_error(error: Exception) -> ApiError:
    """What the client receives; an unexpected error goes to the log instead."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(400, str(error), error.param)
    if isinstance(error, QueueFullError):
        return ApiError(503, str(error), code="queue_full")
    if isinstance(error, EngineStoppedError):
        return ApiError(503, str(error), code="stopped")
    if isinstance(error, EngineAsleepError):
        return ApiError(503, str(error), code="sleeping")
    if isinstance(error, RequestValidationError):
        return _of_body(error)
    if isinstance(error, SpecEngineError):
        logger.error("request failed: %s", error)
        return ApiError(500, str(error))
    logger.error("request failed", exc_info=error)
    return ApiError(500, "internal error; the server's log has the details")


def of_validation(first: Mapping[str, Any], prefix: tuple[int | str, ...] = ()) -> ApiError:
    """first: of pydantic's list of errors. prefix: where in the body the validated part is."""
    kind, place = first["type"], (*prefix, *first["loc"])
    param = _path(place)
    if kind == "extra_forbidden":
        return ApiError(400, f"{param} is not a parameter of this endpoint", param, "unknown_param")
    if kind == "missing":
        return ApiError(400, f"{param} is required", param, "missing_param")
    reason = str(first["msg"]).removeprefix("Value error, ")
    return ApiError(400, f"{param}: {reason[:1].lower()}{reason[1:]}", param)


def _of_body(error: RequestValidationError) -> ApiError:
    first = error.errors()[0]
    place = first["loc"][1:]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", first["msg"])
        return ApiError(400, f"the body is not valid JSON: {reason}", code="invalid_json")
    if not place:
        return ApiError(400, NO_OBJECT)
    return of_validation({**first, "loc": place})


def _path(place: tuple[int | str, ...]) -> str:
    """("messages", 0, "role") -> messages[0].role"""
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in place)
    return "".join(steps).removeprefix(".")


def install_error_handlers(app: FastAPI) -> None:
    async def handle(request: Request, error: Exception) -> Response:
        return as_api_error(error).response()

    async def handle_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if isinstance(error, BodyRefused):
            return error.error.response()
        messages = {
            400: "the body is not valid JSON in UTF-8",
            404: f"there is no {request.url.path} here; GET /openapi.json lists what is",
            405: f"{request.url.path} does not take {request.method}",
        }
        message = messages.get(error.status_code, str(error.detail))
        codes = {400: "invalid_json", 404: "not_found", 405: "method_not_allowed"}
        code = codes.get(error.status_code)
        return ApiError(error.status_code, message, code=code).response()

    for kind in (ApiError, SpecEngineError, RequestValidationError):
        app.add_exception_handler(kind, handle)
    app.add_exception_handler(HTTPException, handle_http)
