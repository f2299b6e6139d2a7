"""Errors, authentication and counting around every route, in plain ASGI: bodies pass untouched."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Sequence
from hashlib import sha256
from hmac import compare_digest

from prometheus_client import Counter
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specengine.server.errors import ApiError, as_api_error

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
PAGES = "/dashboard"  # and below: opened in browsers, which ask for a password


class CatchErrors:
    """Answers what no handler foresaw. (Starlette's own way also drops the connection.)"""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            if started:
                raise
            await as_api_error(error).response()(scope, receive, send)


class RequireKey:
    """Every path but the open ones wants `Authorization: Bearer KEY`, with one of the keys. Pages
    take the key as the password of any name as well."""

    def __init__(
        self, app: ASGIApp, keys: Sequence[str], open_paths: frozenset[str] = OPEN_PATHS
    ) -> None:
        self._app = app
        self._open_paths = open_paths
        self._wanted = [_digest(f"Bearer {key}") for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            header, is_page = Headers(scope=scope).get("authorization", ""), is_of_page(scope)
            given = _digest(_as_bearer(header, is_page))
            # All are compared, each in constant time: how long it takes tells nothing.
            if not sum(compare_digest(given, wanted) for wanted in self._wanted):
                message = "a valid API key is needed, as `Authorization: Bearer KEY`"
                error = ApiError(401, message, code="invalid_api_key")
                response = error.response()
                if is_page:
                    response.headers["WWW-Authenticate"] = 'Basic realm="specengine"'
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)


def is_of_page(scope: Scope) -> bool:
    path: str = scope["path"]
    return path == PAGES or path.startswith(PAGES + "/")


def _as_bearer(header: str, is_page: bool) -> str:
    """`bearer KEY`, and of pages `Basic NAME:KEY` in base64, as `Bearer KEY`; anything else as it
    is. The case of a scheme's name means nothing (RFC 9110, section 11.1)."""
    scheme, _, given = header.partition(" ")
    if scheme.lower() == "bearer":
        return f"Bearer {given.strip(' ')}"
    if scheme.lower() != "basic" or not is_page:
        return header
    try:
        _, _, key = b64decode(given, validate=True).decode().partition(":")
    except ValueError:
        return ""
    return f"Bearer {key}"


def _digest(text: str) -> bytes:
    return sha256(text.encode()).digest()


class CountResponses:
    """Counts by route and status; paths without a route are one label, not one each."""

    def __init__(self, app: ASGIApp, counter: Counter, paths: frozenset[str]) -> None:
        self._app = app
        self._counter = counter
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self._paths else "other"

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._counter.labels(path, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, counted)
