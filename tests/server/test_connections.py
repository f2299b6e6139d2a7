"""Raw HTTP from hostile and careless clients: refused or timed out, and nobody else waits."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from uvicorn import Config
from uvicorn.server import ServerState

from specengine.core.config import ServerConfig
from specengine.core.limits import LimitConfig
from specengine.server import body, connection
from specengine.server.app import create_app
from specengine.server.body import LARGE, BodyReader
from specengine.server.connection import limited_protocol
from specengine.server.run import background_server
from specengine.server.service import Service
from tests.server.conftest import FakeEngine, Site
from tests.support.waiting import until

SERVER = ServerConfig(port=0, log_level="warning")
LIMITS = LimitConfig(max_connections=20)
HASTY = LimitConfig(header_timeout=0.5, body_timeout=0.5, write_timeout=0.5, idle_timeout=1)
BODY = json.dumps({"model": "fake", "prompt": "x"}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
WHOLE = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
READY = b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n"
CLOSE, LAST = (one.replace(b"Host: x", b"Host: x\r\nConnection: close") for one in (READY, WHOLE))


@contextmanager
def limited(limits: LimitConfig) -> Iterator[Site]:
    service = Service(limits)
    service.engine = FakeEngine()
    with (
        background_server(create_app(service), SERVER) as url,
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        yield Site(url, service, http)


@pytest.fixture(scope="module")
def strict_server() -> Iterator[Site]:
    with limited(LIMITS) as site:
        yield site


@pytest.fixture
def strict(strict_server: Site) -> Iterator[Site]:
    """A server of few connections, which serves others afterwards."""
    strict_server.service.engine = FakeEngine()
    yield strict_server
    assert strict_server.post("/v1/completions", model="fake", prompt="x").status_code == 200


@pytest.fixture
def hasty() -> Iterator[Site]:
    """A server that does not wait for slow clients, and serves others afterwards."""
    with limited(HASTY) as site:
        yield site
        until(lambda: statuses(exchange(site, LAST)) == [200])


def connect(site: Site) -> socket.socket:
    host, port = site.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def read_all(open_socket: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    parts = []
    try:
        while part := open_socket.recv(65_536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def exchange(site: Site, content: bytes) -> bytes:
    with connect(site) as client:
        client.sendall(content)
        return read_all(client)


def statuses(answer: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3})", answer)]


SMUGGLED = b"0\r\n\r\n" + READY


@pytest.mark.parametrize(
    "content",
    [
        HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n" + SMUGGLED,
        HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n" + SMUGGLED,
        HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 500\r\n\r\n" + SMUGGLED,
        HEAD + b"TRANSFER-encoding: chunked\r\ncontent-LENGTH: 0\r\n\r\n" + SMUGGLED,
        HEAD + b"Transfer-Encoding: xchunked\r\nContent-Length: 5\r\n\r\n" + SMUGGLED,
        HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + SMUGGLED,
        HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n" + SMUGGLED,
        HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n" + SMUGGLED,
        HEAD + b"Content-Length: -1\r\n\r\n" + SMUGGLED,
        HEAD + b"Content-Length : 5\r\n\r\n" + SMUGGLED,
        HEAD + b"Content-Length: 5\r\n X: y\r\n :\r\n\r\n" + SMUGGLED,
        CHUNKED + b"zz\r\n" + READY,
        CHUNKED + b"5\r\n{}{}{}{}" + READY,
        b"GET /ready HTTP/1.1\r\n\r\n" + READY,  # no host
        b"GET /ready HTTP/1.1\r\nHost: x\r\nBad Header: y\r\n\r\n" + READY,
        b"GET /ready\x00 HTTP/1.1\r\nHost: x\r\n\r\n" + READY,
        b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n" + READY,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20,
    ],
    ids=lambda content: ascii(content[len(HEAD) :][:40]),
)
def test_bad_framing_is_refused_and_closed(strict: Site, content: bytes) -> None:
    """Once: nothing behind the bad request is answered, and no work is done for it."""
    answer = exchange(strict, content)
    assert statuses(answer) in ([400], [501])
    assert b"connection: close" in answer.lower()
    assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["type"] == "invalid_request_error"
    assert isinstance(strict.service.engine, FakeEngine)
    assert strict.service.engine.prompts == []


def test_requests_one_after_the_other_are_answered(strict: Site) -> None:
    """Sent at once, in one packet: lawful, and in order."""
    chunks = CHUNKED + b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
    answer = exchange(strict, WHOLE + READY + chunks + WHOLE + CLOSE)
    assert statuses(answer) == [200] * 5


def test_header_at_its_limit_passes(strict: Site) -> None:
    longest = CLOSE.replace(b"\r\n\r\n", b"\r\nX: \r\n\r\n")
    longest = longest.replace(b"X: ", b"X: " + b"a" * (LIMITS.max_header_bytes - len(longest)))
    assert len(longest) == LIMITS.max_header_bytes
    assert statuses(exchange(strict, longest)) == [200]


@pytest.mark.parametrize(
    "content",
    [
        b"GET /ready HTTP/1.1\r\nX: " + b"a" * (LIMITS.max_header_bytes + 1),
        b"GET /ready HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 5000 + b"\r\n",
        READY.replace(b"\r\n\r\n", b"\r\nX: " + b"a" * LIMITS.max_header_bytes + b"\r\n\r\n"),
        READY.replace(b"Host: ", b"Host: " + b" " * LIMITS.max_header_bytes),
        WHOLE.replace(b"HTTP/1.1\r\n", b"HTTP/1.1\r\nX: " + b"a" * 16_384 + b"\r\n"),
        WHOLE.replace(b"/v1/completions", b"/v1/completions?" + b"a" * 16_384),
    ],
    ids=["endless", "many", "whole", "spaces", "before a body", "first line"],
)
def test_header_beyond_its_limit_is_refused_by_the_flag(strict: Site, content: bytes) -> None:
    """Also one that comes in one packet."""
    answer = exchange(strict, content + READY)
    assert statuses(answer) == [431]
    assert b"--max-header-bytes" in answer
    assert isinstance(strict.service.engine, FakeEngine)
    assert strict.service.engine.prompts == []


def test_large_body_behind_a_short_header_is_not_counted_as_header(strict: Site) -> None:
    content = json.dumps({"model": "fake", "prompt": "x", "metadata": "a" * 40_000}).encode()
    head = HEAD.replace(b"Host: x", b"Host: x\r\nConnection: close")
    whole = head + b"Content-Length: %d\r\n\r\n" % len(content) + content
    assert statuses(exchange(strict, whole)) == [200]


HALVES = [
    (b"", "the header took longer"),
    (b"G", "the header took longer"),
    (READY[:-1], "the header took longer"),
    (WHOLE[:-1], "the body took longer"),
    (CHUNKED, "the body took longer"),
    (CHUNKED + b"5\r\n{", "the body took longer"),
]


def test_half_a_request_times_out(hasty: Site) -> None:
    """First on its connection, second, and behind a body: all wait at the same time."""
    cases = [(before, *half) for before in (b"", READY, WHOLE) for half in HALVES]
    with ExitStack() as open_ones:
        clients = []
        for before, content, _ in cases:
            clients.append(open_ones.enter_context(connect(hasty)))
            clients[-1].sendall(before + content)
        for (before, content, message), client in zip(cases, clients, strict=True):
            answer = read_all(client)
            if before and not content:  # between requests it is idle
                assert statuses(answer) == [200]
                continue
            assert statuses(answer) == ([200, 408] if before else [408]), (before, content)
            assert message in answer.decode(), (before, content)


def test_drip_fed_body_times_out(hasty: Site) -> None:
    """The time counts from the header, however often a byte comes."""
    with connect(hasty) as client:
        client.sendall(CHUNKED)
        client.settimeout(0.05)
        for _ in range(400):
            try:
                client.sendall(b"1\r\n \r\n")
                if part := client.recv(65_536):
                    break
            except TimeoutError:
                continue
    assert statuses(part) == [408]


def test_connections_beyond_the_cap_are_refused(strict: Site) -> None:
    with ExitStack() as open_ones:
        clients = [open_ones.enter_context(connect(strict)) for _ in range(LIMITS.max_connections)]
        for client in clients:
            client.sendall(READY)
        answers = [client.recv(65_536) for client in clients]
        answers.append(exchange(strict, READY))
    refused = [answer for answer in answers if statuses(answer) == [503]]
    assert len(refused) in (1, 2)  # the connection of `strict.http` may be idle still
    assert b"retry-after: 1" in refused[0].lower()
    assert statuses(answers[0]) == [200]
    until(lambda: statuses(exchange(strict, CLOSE)) == [200])


def test_client_that_never_reads_is_dropped_and_its_work_aborted(hasty: Site) -> None:
    engine = FakeEngine(context_length=3000, script="x" * 900)
    hasty.service.engine = engine
    fields = {"model": "fake", "prompt": "x", "max_tokens": 1000, "stream": True, "n": 128}
    content = json.dumps({**fields, "logprobs": 20}).encode()
    with connect(hasty) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(content) + content)
        until(lambda: engine.aborted)


class Timers:
    """An event loop's, of which none ends. live: what is to be called, after so many seconds."""

    def __init__(self) -> None:
        self.live = list[tuple[float, Any]]()

    def call_later(self, seconds: float, call: Any, *given: Any) -> Any:
        timer = seconds, call
        self.live.append(timer)
        return SimpleNamespace(cancel=lambda: timer in self.live and self.live.remove(timer))


def connected(limits: LimitConfig, state: ServerState, timers: Any) -> Any:
    """One more connection of a server, without a socket."""
    config = Config(create_app(Service(limits)), log_config=None)
    made = limited_protocol(limits)(config, state, {}, timers)
    transport = Mock(spec=asyncio.Transport)
    transport.is_closing.side_effect = lambda: transport.close.called
    made.connection_made(transport)
    return made


def test_client_that_reads_on_in_time_is_not_dropped() -> None:
    timers = Timers()
    client = connected(LimitConfig(write_timeout=7.0), ServerState(), timers)
    before = list(timers.live)
    client.pause_writing()
    assert timers.live == [*before, (7.0, client.transport.abort)]
    client.resume_writing()
    assert timers.live == before


def test_idle_client_that_does_not_read_the_end_is_dropped() -> None:
    timers = Timers()
    client = connected(LimitConfig(write_timeout=7.0), ServerState(), timers)
    client.timeout_keep_alive_handler()
    assert timers.live == [(7.0, client.transport.abort)]


def test_connections_up_to_the_cap_are_no_surplus() -> None:
    state, limits = ServerState(), LimitConfig(max_connections=2)
    found = [connected(limits, state, Timers()) for _ in range(3)]
    assert [one.is_surplus for one in found] == [False, False, True]


def test_refused_body_is_dropped_as_it_comes_up_to_a_bound(
    strict: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_DROPPED", 100_000)
    with connect(strict) as client:
        client.sendall(CHUNKED.replace(b"/v1/completions", b"/v1/nothing"))
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            client.sendall((b"400\r\n" + b" " * 0x400 + b"\r\n") * 20_000)


def test_probe_is_answered_beside_those_who_hold_on(site: Site, engine: Any) -> None:
    """With the default limits: hundreds of half requests."""
    with ExitStack() as open_ones:
        for number in range(300):
            client = open_ones.enter_context(connect(site))
            client.sendall((b"GET /re", CHUNKED + b"5\r\n{", WHOLE[:-1])[number % 3])
        assert statuses(exchange(site, CLOSE)) == [200]


def test_memory_of_large_bodies_is_given_back_once_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trims: list[int] = []
    monkeypatch.setattr(body, "trim_memory", lambda: trims.append(1))
    later: list[tuple[float, Callable[[], None]]] = []
    reader = BodyReader(LIMITS)

    def call_later(seconds: float, call: Callable[[], None]) -> object:
        later.append((seconds, call))
        return object()

    async def all_at_once() -> None:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "call_later", call_later)
        for size in (100, LARGE + 1, LARGE + 1):
            await reader.parse(b"{}".ljust(size), Service())
        assert [seconds for seconds, _ in later] == [body.TRIM_AFTER]
        assert not trims
        later.pop()[1]()
        while not trims:
            await asyncio.sleep(0)
        await reader.parse(b"{}".ljust(LARGE + 1), Service())
        assert len(later) == 1, "the next seconds begin anew"

    asyncio.run(all_at_once())
    assert len(trims) == 1


@pytest.mark.parametrize("content", [b"[[], []]", b"[[]", b"[" * 100_000])
def test_parsing_collects_no_garbage_and_leaves_collections_on(
    content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    phases: list[str] = []
    during: list[int] = []
    parse = json.loads

    def count(phase: str, info: Any) -> None:
        phases.append(phase)

    def loads(text: bytes) -> Any:
        before = len(phases)
        try:
            return parse(text)
        finally:
            during.append(len(phases) - before)

    monkeypatch.setattr("specengine.server.body.json.loads", loads)
    gc.callbacks.append(count)
    try:
        with suppress(ValueError, RecursionError):
            body._loads(content.replace(b"[]", b"[]," * 50_000 + b"[]"))
    finally:
        gc.callbacks.remove(count)
    assert during == [0]
    assert gc.isenabled()


def test_others_get_their_turn_between_large_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, order = BodyReader(LIMITS), []
    monkeypatch.setattr(reader, "_parse", lambda *given: order.append("parse"))

    async def others() -> None:
        for _ in range(40):
            order.append("other")
            await asyncio.sleep(0)

    async def all_at_once() -> None:
        bodies = [reader.parse(b" " * (LARGE + 1), Service()) for _ in range(8)]
        await asyncio.gather(*bodies, others())

    asyncio.run(all_at_once())
    assert order.count("parse") == 8
    assert "parse parse" not in " ".join(order)
