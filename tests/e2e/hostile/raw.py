"""Hostile uses of a connection: bad framing, half requests, slow ones, and answers left unread."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from random import Random

BODY = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 2}).encode()
STREAM = json.dumps(
    {"model": "tiny", "prompt": "x", "max_tokens": 1500, "ignore_eos": True, "stream": True}
).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
WHOLE = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
LONG = HEAD + b"Content-Length: %d\r\n\r\n" % len(STREAM) + STREAM
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
READY = b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n"
SMUGGLED = b"0\r\n\r\n" + READY

# Each is refused once, and what follows it is not answered.
BAD = (
    HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n" + SMUGGLED,
    HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 500\r\n\r\n" + SMUGGLED,
    HEAD + b"Transfer-Encoding: xchunked\r\nContent-Length: 5\r\n\r\n" + SMUGGLED,
    HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + SMUGGLED,
    HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n" + SMUGGLED,
    HEAD + b"Content-Length: -1\r\n\r\n" + SMUGGLED,
    HEAD + b"Content-Length: 99999999999999999999999\r\n\r\n" + SMUGGLED,
    HEAD + b"Content-Length: 1e3\r\n\r\n" + SMUGGLED,
    HEAD + b"Content-Length : 5\r\n\r\n" + SMUGGLED,
    CHUNKED + b"zz\r\n" + READY,
    CHUNKED + b"FFFFFFFFFFFFFFFFFF\r\n" + READY,
    CHUNKED + b"5;" + b"x" * 20_000 + b"\r\n" + READY,
    b"GET /ready HTTP/1.1\r\n\r\n" + READY,
    b"GET /ready HTTP/9.9\r\nHost: x\r\n\r\n" + READY,
    b"GET /ready\x00 HTTP/1.1\r\nHost: x\r\n\r\n" + READY,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20,
    b"GET /ready HTTP/1.1\r\nX: " + b"a" * 20_000,
    b"GET /ready HTTP/1.1\r\n" + b"X: y\r\n" * 5000 + b"\r\n",
)


@dataclass
class Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    longest: float  # seconds that it is left open

    def drop(self) -> None:
        """Reset it, rather than close it in order."""
        raw = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.close()


def statuses(answer: bytes) -> list[int]:
    """The statuses of all the answers on a connection."""
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]


Act = Callable[[Connection, Random], Awaitable[bytes | None]]


async def misuse(host: str, port: int, random: Random, longest: float) -> tuple[str, bytes | None]:
    """One connection, used in one of the ways. Its name, and what was answered, if that was read.
    longest: seconds that one is left open."""
    act = random.choices(ACTS, WEIGHTS)[0]
    name = act.__name__
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError:
        return name, None
    connection = Connection(reader, writer, longest)
    try:
        with suppress(ConnectionError, TimeoutError):
            return name, await act(connection, random)
        return name, None
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def bad_framing(connection: Connection, random: Random) -> bytes:
    connection.writer.write(random.choice(BAD))
    return await _answer(connection)


async def spoiled_bytes(connection: Connection, random: Random) -> bytes:
    request = bytearray(random.choice((WHOLE, CHUNKED + b"5\r\n{}   \r\n0\r\n\r\n", READY)))
    for _ in range(random.choice((1, 2, 8))):
        request[random.randrange(len(request))] = random.randrange(256)
    connection.writer.write(bytes(request))
    if random.random() < 0.5:
        connection.writer.write_eof()
    return await _answer(connection)


async def noise(connection: Connection, random: Random) -> bytes:
    connection.writer.write(random.randbytes(random.randrange(1, 3000)))
    return await _answer(connection)


async def half_a_request(connection: Connection, random: Random) -> None:
    """Left open for a while, then dropped."""
    request = random.choice((WHOLE, READY, CHUNKED + b"5\r\n{", b""))
    connection.writer.write(request[: random.randrange(len(request) + 1)])
    await asyncio.sleep(random.uniform(0.1, connection.longest))


async def slow_body(connection: Connection, random: Random) -> None:
    connection.writer.write(CHUNKED)
    count = random.randrange(1, 40)
    for _ in range(count):
        connection.writer.write(b"1\r\n \r\n")
        await connection.writer.drain()
        await asyncio.sleep(min(0.2, connection.longest / count))


async def drops_in_a_stream(connection: Connection, random: Random) -> None:
    connection.writer.write(LONG)
    await connection.reader.read(random.choice((1, 2000)))
    connection.drop()


async def drops_at_once(connection: Connection, random: Random) -> None:
    connection.writer.write(LONG)
    await connection.writer.drain()
    connection.drop()


async def never_reads(connection: Connection, random: Random) -> None:
    raw = connection.writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.reader._transport.pause_reading()  # type: ignore[attr-defined]
    connection.writer.write(LONG)
    await asyncio.sleep(random.uniform(0.5, min(5, connection.longest)))


async def many_at_once(connection: Connection, random: Random) -> bytes:
    """Requests one behind the other, none of them waited for."""
    connection.writer.write(READY * random.randrange(2, 60))
    return await _answer(connection)


async def _answer(connection: Connection) -> bytes:
    """What comes until it is closed, or for a second."""
    parts: list[bytes] = []
    with suppress(TimeoutError, ConnectionError):
        async with asyncio.timeout(1):
            while part := await connection.reader.read(65_536):
                parts.append(part)
    return b"".join(parts)


WAYS: dict[Act, int] = {
    bad_framing: 4,
    spoiled_bytes: 4,
    noise: 2,
    half_a_request: 4,
    slow_body: 1,
    drops_in_a_stream: 2,
    drops_at_once: 1,
    never_reads: 1,
    many_at_once: 1,
}
ACTS, WEIGHTS = list(WAYS), list(WAYS.values())
