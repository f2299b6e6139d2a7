"""One HTTP connection: uvicorn's, with limits on time and number, and strict about its framing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from specengine.core.limits import LimitConfig
from specengine.server.errors import ApiError
from specengine.server.json_bytes import dumps

logger = logging.getLogger(__name__)

# Bytes of a refused body that are read and dropped, so that the client gets to read the refusal.
MAX_DROPPED = 64 * 2**20


class StrictConnection(h11.Connection):
    """Refuses a request with both Content-Length and Transfer-Encoding. h11 goes by the latter; a
    proxy that goes by the former sees another request in the body (RFC 9112, section 6.1). Other
    versions of HTTP are refused as well, which h11 leaves to its caller, and a header beyond the
    limit that came whole, of which h11 counts what is unfinished alone.

    Chunks of an answer, which change no state, are framed here: h11 needs a quarter of the time
    that an event takes. The head of an answer waits for what follows it, as ASGI asks: on its own
    it would cost both sides a system call, and wake the client for nothing."""

    def __init__(self, max_header_bytes: int) -> None:
        super().__init__(h11.SERVER, max_header_bytes)
        self._max_header_bytes = max_header_bytes
        self.is_header_too_long = False
        self._is_chunked = False  # the answer that is being sent
        self._head = b""  # of it, until something follows

    def send(self, event: Any) -> Any:
        if type(event) is h11.Response:
            self._head = super().send(event) or b""
            self._is_chunked = b"\r\ntransfer-encoding: chunked\r\n" in self._head.lower()
            return b""
        head, self._head = self._head, b""
        if type(event) is h11.Data and self._is_chunked and self.our_state is h11.SEND_BODY:
            data = event.data
            return head + b"%x\r\n%b\r\n" % (len(data), data) if data else head
        sent = super().send(event)
        return head + sent if head and sent is not None else sent

    def next_event(self) -> Any:
        is_header = self.their_state is h11.IDLE
        num_waiting = len(self.trailing_data[0]) if is_header else 0
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            self.is_header_too_long = is_header and error.error_status_hint == 431
            raise
        if isinstance(event, h11.Request):
            if num_waiting - len(self.trailing_data[0]) > self._max_header_bytes:
                self.is_header_too_long = True
                raise h11.RemoteProtocolError("the header is too long", error_status_hint=431)
            names = {name for name, _ in event.headers}
            if {b"content-length", b"transfer-encoding"} <= names:
                raise h11.RemoteProtocolError("both Content-Length and Transfer-Encoding")
            if event.http_version not in (b"1.0", b"1.1"):
                raise h11.RemoteProtocolError("not HTTP/1.1")
        return event


class LimitedProtocol(H11Protocol):
    """At most one timer runs for what the client owes: headers, a body, or to read the last of a
    connection that is closed."""

    limits: ClassVar[LimitConfig]
    conn: StrictConnection
    on_lost: Callable[[], object] | None  # called when the connection has ended

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = StrictConnection(self.limits.max_header_bytes)
        self.on_lost = None
        self.is_surplus = False  # it is refused when it asks for something
        self._num_dropped = 0  # bytes of the present body
        self._waits_for: tuple[str, Any] | None = None  # and the request before it
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.is_surplus |= len(self.connections) > self.limits.max_connections
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._waits_for = None
        _cancel(self._reading)
        _cancel(self._writing)
        super().connection_lost(exc)
        if self.on_lost is not None:
            self.on_lost()

    def data_received(self, data: bytes) -> None:
        if self.is_surplus:
            self.refuse(503, "too many connections are open; retry later")
            return
        is_answered = self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY
        self._num_dropped = self._num_dropped + len(data) if is_answered else 0
        if self._num_dropped > MAX_DROPPED:
            self.transport.close()
            self._watch()
            return
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        if self.conn.is_header_too_long:
            limit = self.limits.max_header_bytes
            message = f"the request's first line and headers have more than {limit} bytes"
            self.refuse(431, f"{message} (--max-header-bytes)")
        else:
            self.refuse(400, "this is no valid HTTP/1.1 request")

    def refuse(self, status: int, message: str) -> None:
        """Close the connection, with an answer where none has begun."""
        logger.info("refused a connection with %d: %s", status, message)
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # its task may go on, and must not write any more
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not self.transport.is_closing():
            error = ApiError(status, message, code="connection_refused")
            body = dumps(error.body())
            headers = {
                "content-type": "application/json",
                "content-length": str(len(body)),
                "connection": "close",
                **error.headers(),
            }
            parts = (
                h11.Response(
                    status_code=status,
                    headers=list(headers.items()),
                    reason=STATUS_PHRASES[status],
                ),
                h11.Data(data=body),
                h11.EndOfMessage(),
            )
            self.transport.write(b"".join(self.conn.send(part) or b"" for part in parts))
        self.transport.close()
        self._watch()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        _cancel(self._writing)
        self._writing = self.loop.call_later(self.limits.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._writing)

    def _watch(self) -> None:
        """Start the timer of what the client owes now. It runs on while the same is owed."""
        waits_for = self._owed()
        if waits_for == self._waits_for:
            return
        self._waits_for = waits_for
        _cancel(self._reading)
        if waits_for is None:
            return
        seconds: float = getattr(self.limits, f"{waits_for[0]}_timeout")
        if self.transport.is_closing():
            self._reading = self.loop.call_later(seconds, self.transport.abort)
        else:
            message = f"the {waits_for[0]} took longer than {seconds:g} s"
            self._reading = self.loop.call_later(seconds, self.refuse, 408, message)

    def _owed(self) -> tuple[str, Any] | None:
        if self.transport.is_closing():
            return "write", self.cycle
        if self.conn.their_state is h11.SEND_BODY:
            return "body", self.cycle
        if self.conn.their_state is h11.IDLE and (self.cycle is None or self.conn.trailing_data[0]):
            return "header", self.cycle
        return None


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def limited_protocol(limits: LimitConfig) -> type[LimitedProtocol]:
    """A class, which is what uvicorn takes."""
    return type("Protocol", (LimitedProtocol,), {"limits": limits})
