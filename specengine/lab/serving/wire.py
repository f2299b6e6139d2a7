"""A client's connections: HTTP/1.1 written and read by hand, one request at a time on each, and the
server-sent events of its answer.

At 80,000 events a second a general client is the bottleneck, not the server. Only what servers of
this protocol send is understood: bodies that are chunked, have a Content-Length, or end with the
connection.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from time import perf_counter
from typing import cast
from urllib.parse import urlsplit

from specengine.lab.serving.events import Answer

_MOST_HEAD = 65_536  # bytes


class Connection(asyncio.Protocol):
    """is_open: it can carry another request. has_served: it carried one to its end."""

    def __init__(self) -> None:
        self.is_open = False
        self.has_served = False
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None
        self._ended: asyncio.Future[None] | None = None
        self._rest = b""
        self._read: Callable[[bytes, float], None] = self._read_head
        self._left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.is_open = cast(asyncio.Transport, transport), True

    async def ask(self, request: bytes, answer: Answer) -> None:
        """Raises ConnectionError where the server cuts the answer off."""
        assert self._transport is not None
        if not self.is_open:
            raise ConnectionResetError("the connection is closed")
        self._answer, self._read, self._rest = answer, self._read_head, b""
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._ended
        except BaseException:  # it was left in the middle of an answer
            self.close()
            raise
        self.has_served = True

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._ended is None or self._ended.done():
            self.close()  # bytes that nothing asked for
            return
        now = perf_counter()
        try:
            self._read(self._rest + data if self._rest else data, now)
        except ValueError as error:
            self._fail(ConnectionError(f"not HTTP/1.1: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._read == self._read_to_end:
            self._end()
        else:
            self._fail(ConnectionResetError(str(error or "closed before the answer's end")))

    def _fail(self, error: Exception) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)
        self.close()

    def _end(self) -> None:
        self._rest = b""
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def _read_head(self, data: bytes, now: float) -> None:
        head, found, body = data.partition(b"\r\n\r\n")
        if not found:
            if len(data) > _MOST_HEAD:
                raise ValueError("a head without end")
            self._rest = data
            return
        status_line, *lines = head.split(b"\r\n")
        assert self._answer is not None
        self._answer.status = int(status_line.split(b" ", 2)[1])
        fields = {name.strip().lower(): value.strip() for name, _, value in map(_field, lines)}
        if fields.get(b"connection", b"").lower() == b"close":
            self.is_open = False
        self._answer.is_stream = fields.get(b"content-type", b"").startswith(b"text/event-stream")
        self._rest = b""
        if b"chunked" in fields.get(b"transfer-encoding", b"").lower():
            self._read = self._read_chunks
        elif b"content-length" in fields:
            self._left, self._read = int(fields[b"content-length"]), self._read_counted
        else:
            self._read = self._read_to_end
        self._read(body, now)

    def _read_chunks(self, data: bytes, now: float) -> None:
        """Whole chunks; the rest waits."""
        assert self._answer is not None
        pieces: list[bytes] = []
        place = 0
        while (line_end := data.find(b"\r\n", place)) >= 0:
            size = int(data[place:line_end].partition(b";")[0], 16)
            end = line_end + 2 + size
            if len(data) < end + 2:
                break
            if not size:
                self._answer.feed(b"".join(pieces), now)
                self._end()
                return
            pieces.append(data[line_end + 2 : end])
            place = end + 2
        self._rest = data[place:]
        if pieces:
            self._answer.feed(pieces[0] if len(pieces) == 1 else b"".join(pieces), now)

    def _read_counted(self, data: bytes, now: float) -> None:
        assert self._answer is not None
        self._rest = b""
        self._left -= len(data)
        self._answer.feed(data, now)
        if self._left <= 0:
            self._end()

    def _read_to_end(self, data: bytes, now: float) -> None:
        assert self._answer is not None
        self._rest = b""
        self._answer.feed(data, now)


def _field(line: bytes) -> tuple[bytes, bytes, bytes]:
    return line.partition(b":")


class Connections:
    """Opened when none is idle; idle ones are used again. url: http:// or https://."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._secure = ssl.create_default_context() if parts.scheme == "https" else None
        self._host = parts.hostname or "127.0.0.1"
        self._port = parts.port or (443 if self._secure else 80)
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()

    async def take(self, new: bool = False) -> Connection:
        """new: not one that waited. Raises OSError."""
        while self._idle and not new:
            found = self._idle.pop()
            if found.is_open:
                return found
            self._all.discard(found)
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(Connection, self._host, self._port, ssl=self._secure)
        self._all.add(made)
        return made

    def give_back(self, connection: Connection) -> None:
        if connection.is_open:
            self._idle.append(connection)
        else:
            connection.close()
            self._all.discard(connection)

    def close(self) -> None:
        for connection in self._all:
            connection.close()
