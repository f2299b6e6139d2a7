"""Reading the bodies of requests, within the limits."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable, Coroutine
from email.message import Message
from inspect import iscoroutinefunction
from typing import Any, TypeVar, get_type_hints

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from specengine.core.limits import LimitConfig
from specengine.core.trim import trim_memory
from specengine.server.bounds import check_bounds, check_text
from specengine.server.errors import NO_OBJECT, ApiError, BodyRefused, of_validation
from specengine.server.service import Service

Model = TypeVar("Model", bound=BaseModel)

JSON_TYPES = ("application/json", "application/json; charset=utf-8")
# Bodies above this are parsed one after the other, so that other work gets its turn between them.
LARGE = 65_536
TRIM_AFTER = 3.0  # seconds


def _loads(body: bytes) -> Any:
    """The JSON, without garbage collections meanwhile: each would walk through all that is parsed
    so far, and a million lists take 0.6 s instead of 0.04."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return json.loads(body)
    finally:
        if collects:
            gc.enable()


class BodyReader:
    """What the bodies of all requests share."""

    def __init__(self, limits: LimitConfig) -> None:
        self.limits = limits
        self._num_buffered = 0  # bytes
        self._turn = asyncio.Lock()
        self._trim: asyncio.TimerHandle | None = None

    async def read(self, request: Request) -> bytes:
        """The body. ApiError where it, or all that are being read, have too many bytes."""
        declared = request.headers.get("content-length", "0")
        if int(declared) > self.limits.max_body_bytes:
            raise self._too_large()
        chunks, size = [], 0
        try:
            async for chunk in request.stream():
                size += len(chunk)
                self._num_buffered += len(chunk)
                if size > self.limits.max_body_bytes:
                    raise self._too_large()
                if self._num_buffered > self.limits.max_buffered_bytes:
                    message = "too many bodies are being read; retry later"
                    raise ApiError(503, message, code="overloaded")
                chunks.append(chunk)
            return b"".join(chunks)
        finally:
            self._num_buffered -= size

    async def parse(self, body: bytes, service: Service) -> Any:
        """The JSON of a body, fields no larger than allowed. Raises ApiError, ValueError and
        RecursionError."""
        if len(body) <= LARGE:
            return self._parse(body, service)
        async with self._turn:
            await asyncio.sleep(0)
            self._trim_later()
            return self._parse(body, service)

    def _trim_later(self) -> None:
        """Give the memory of large bodies back to the system, once for all of the next seconds: the
        allocator keeps most of what is free between other blocks."""
        if self._trim is None:
            loop = asyncio.get_running_loop()

            def trim() -> None:
                self._trim = None
                loop.run_in_executor(None, trim_memory)

            self._trim = loop.call_later(TRIM_AFTER, trim)

    def _parse(self, body: bytes, service: Service) -> Any:
        """Separators bound the number of values: counting takes a hundredth of parsing."""
        most = self.limits.max_json_values
        if len(body) > most and sum(map(body.count, (b",", b"[", b"{"))) >= most:
            option = self.limits.options()["max_json_values"]
            message = f"the body has too many values; at most {most} are taken ({option.flag})"
            raise ApiError(400, message, code="limit_exceeded")
        parsed = _loads(body)
        check_bounds(parsed, self.limits)
        if service.engine is not None:
            check_text(parsed, self.limits, service.engine.context_length)
        return parsed

    def _too_large(self) -> ApiError:
        option = self.limits.options()["max_body_bytes"]
        message = f"the body has more than {self.limits.max_body_bytes} bytes ({option.flag})"
        return ApiError(413, message, code="body_too_large")


class LimitedRequest(Request):
    """Its body is read by the application's BodyReader."""

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            try:
                self._body = await self.app.state.bodies.read(self)
            except ApiError as error:
                raise BodyRefused(error) from None
        return self._body

    async def json(self) -> Any:
        try:
            return await self.app.state.bodies.parse(await self.body(), self.app.state.service)
        except ApiError as error:
            raise BodyRefused(error) from None

    async def model(self, kind: type[Model]) -> Model:
        """The body as FastAPI reads it, with the same errors, and without the work that only other
        kinds of parameters need. Raises HTTPException, and what validators raise."""
        parsed = None
        try:
            if await self.body() and self._is_json():
                parsed = await self.json()
        except json.JSONDecodeError as error:
            message = f"the body is not valid JSON: {error.msg}"
            raise ApiError(400, message, code="invalid_json") from error
        except HTTPException:
            raise
        except Exception as error:  # the client left, say
            raise HTTPException(400) from error
        if not isinstance(parsed, dict):
            raise ApiError(400, NO_OBJECT)
        try:
            return kind.model_validate(parsed)
        except ValidationError as error:
            raise of_validation(error.errors(include_url=False, include_input=False)[0]) from None

    def _is_json(self) -> bool:
        given = self.headers.get("content-type", "")
        if given in JSON_TYPES:  # what nearly all send
            return True
        message = Message()
        message["content-type"] = given
        main, _, kind = message.get_content_type().partition("/")
        return main == "application" and (kind == "json" or kind.endswith("+json"))


class LimitedRoute(APIRoute):
    """Endpoints that take `body`, a model, and `request` are called without FastAPI's solving of
    dependencies, which takes longer than all else that is done with a short request's body, and
    without what it keeps around each call for them. Their errors are answered where those of
    unknown routes are."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        kind = _model_of(self.endpoint)
        if kind is not None:
            self.app = _call_with(self.endpoint, kind)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def limited(request: Request) -> Response:
            return await handle(LimitedRequest(request.scope, request.receive))

        return limited


def _call_with(endpoint: Callable[..., Any], kind: type[BaseModel]) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request = LimitedRequest(scope, receive)
        response = await endpoint(await request.model(kind), request)
        await response(scope, receive, send)

    return app


def _model_of(endpoint: Callable[..., Any]) -> type[BaseModel] | None:
    """Of `body`, where the endpoint is a coroutine of `body` and `request`."""
    hints = get_type_hints(endpoint)
    hints.pop("return", None)
    kind = hints.get("body")
    fits = list(hints) == ["body", "request"] and hints["request"] is Request
    is_model = isinstance(kind, type) and issubclass(kind, BaseModel)
    return kind if fits and is_model and iscoroutinefunction(endpoint) else None
