"""One line of the log for each request, and the id by which client and log know it."""

from __future__ import annotations

import logging
import re
import time
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any

import orjson
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specengine.core.spec_stats import SpecStats
from specengine.engine.outputs import RequestOutput, add_stats
from specengine.server.middleware import OPEN_PATHS, is_of_page

logger = logging.getLogger(__name__)

HEADER = "x-request-id"
_GOOD_ID = re.compile(r"[!-~]{1,128}")  # visible ASCII
_EVENT_WITH_ERROR = b'data: {"error":'


@dataclass
class RequestRecord:
    """What is known of a request that is being answered."""

    id: str
    started: float = field(default_factory=time.monotonic)
    status: int | None = None  # None: the client left before it was sent
    error: dict[str, Any] | None = None  # OpenAI's, as sent
    is_abandoned: bool = False  # by its client
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_token: float | None = None  # seconds after it was queued, of the first choice to have one
    spec: SpecStats = field(default_factory=SpecStats)

    def count(self, output: RequestOutput) -> None:
        """Add the last output of a choice."""
        self.completion_tokens += len(output.token_ids)
        add_stats(self.spec, output.spec)
        times = output.times
        if times.first_token is not None:
            waited = times.first_token - times.arrival
            self.first_token = waited if self.first_token is None else min(waited, self.first_token)

    def fields(self) -> dict[str, Any]:
        """As they are logged; what does not apply is left out."""
        found: dict[str, Any] = {
            "request_id": self.id,
            "status": self.status,
            "seconds": round(time.monotonic() - self.started, 4),
        }
        if self.prompt_tokens:
            found["prompt_tokens"] = self.prompt_tokens
        if self.completion_tokens:
            found["completion_tokens"] = self.completion_tokens
        if self.spec.num_rounds:  # known of choices that ended
            found["accepted_length"] = round(self.spec.mean_acceptance_length, 4)
        if self.first_token is not None:
            found["first_token_seconds"] = round(self.first_token, 4)
        if self.error is not None:
            found |= {f"error_{name}": self.error.get(name) for name in ("code", "message")}
        return found | ({"abandoned": True} if self.is_abandoned else {})


def record_of(scope: Scope) -> RequestRecord:
    record: RequestRecord = scope["state"]["record"]
    return record


def label_of(request: Request) -> str:
    """What its client calls the request: X-Request-Id."""
    return record_of(request.scope).id


class RequestLog:
    """The outermost layer: it sees every answer of the application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        record = RequestRecord(given if _GOOD_ID.fullmatch(given) else token_hex(16))
        scope.setdefault("state", {})["record"] = record

        async def watched_receive() -> Message:
            message = await receive()
            record.is_abandoned |= message["type"] == "http.disconnect" and not is_complete
            return message

        is_complete = False

        async def watched_send(message: Message) -> None:
            nonlocal is_complete
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)[HEADER] = record.id
            else:
                _note_error(record, message.get("body", b""))
                is_complete = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, watched_receive, watched_send)
        finally:
            if scope["path"] not in OPEN_PATHS and not (is_of_page(scope) and record.status == 200):
                _log(scope, record)


def _note_error(record: RequestRecord, body: bytes) -> None:
    """An answer that is an error, or an event of a stream that is one."""
    is_event = body.startswith(_EVENT_WITH_ERROR)
    if is_event or (body and record.status is not None and record.status >= 400):
        try:
            record.error = orjson.loads(body.removeprefix(b"data: "))["error"]
        except (ValueError, LookupError, TypeError):
            record.error = {"message": "not in this API's form"}


def _log(scope: Scope, record: RequestRecord) -> None:
    what = {"method": scope["method"], "path": scope["path"]}
    fields = record.fields()
    text = " ".join(f"{name}={value}" for name, value in fields.items())
    logger.info("%s %s %s", *what.values(), text, extra={"fields": what | fields})
