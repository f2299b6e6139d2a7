"""What lies between a request's bytes and the engine, where it takes another way than FastAPI's or
h11's: the same answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import h11
import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from specengine.core.config import EngineConfig, ModelConfig
from specengine.core.limits import LimitConfig
from specengine.server.body import BodyReader, LimitedRequest, LimitedRoute
from specengine.server.completions import encode_prompts
from specengine.server.connection import StrictConnection
from specengine.server.errors import ApiError, install_error_handlers, json_response
from specengine.server.protocol import CompletionRequest
from specengine.server.service import Service
from specengine.server.streaming import EventStream
from tests.server.conftest import FakeEngine

JSON = "application/json"
GOOD = b'{"model": "fake", "prompt": [1, 2], "max_tokens": 3}'


class SolvedRoute(APIRoute):
    """Limits of the body, and FastAPI's own handler."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        handle = super().get_route_handler()

        async def limited(request: Request) -> Response:
            return await handle(LimitedRequest(request.scope, request.receive))

        return limited


def app_of(route: type[APIRoute]) -> FastAPI:
    app = FastAPI()
    app.router.route_class = route
    app.state.service = Service(LimitConfig(max_stop_strings=2, max_body_bytes=300_000))
    app.state.bodies = BodyReader(app.state.service.limits)
    install_error_handlers(app)

    @app.post("/v1/completions")
    async def endpoint(body: CompletionRequest, request: Request) -> Response:
        return json_response([body.model_dump(), request.url.path])

    return app


async def answers(
    app: FastAPI, content: bytes, headers: dict[str, str]
) -> tuple[int, Any, list[str]]:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        found = await client.post("/v1/completions", content=content, headers=headers)
    return found.status_code, found.json(), sorted(found.headers)


BODIES = [
    (GOOD, JSON),
    (GOOD, "application/json; charset=utf-8"),
    (GOOD, "Application/JSON;v=1"),
    (GOOD, "application/vnd.some+json"),
    (GOOD, "text/json"),
    (GOOD, "text/plain"),
    (GOOD, "nonsense"),
    (GOOD, None),
    (b"", JSON),
    (b"", None),
    (b"[1]", JSON),
    (b"null", JSON),
    (b'"model"', JSON),
    (b"7", JSON),
    (b'{"model": ', JSON),
    (b'{"model": "fake"} x', JSON),
    (b"\xff", JSON),
    (b'{"model": "\xff"}', JSON),
    (b"[" * 100_000, JSON),
    (b"{}", JSON),
    (b'{"model": 3, "prompt": 4, "n": "a"}', JSON),
    (b'{"model": "fake", "prompt": "a", "max_tokens": 1.5}', JSON),
    (b'{"model": "fake", "prompt": "a", "temperature": NaN}', JSON),
    (b'{"model": "fake", "prompt": [1, "a"]}', JSON),
    (b'{"model": "fake", "prompt": [[1, 2], "a", [3]]}', JSON),
    (b'{"model": "fake", "prompt": "a", "no_such": 1, "nor_this": 2}', JSON),
    (b'{"model": "fake", "prompt": "a", "max_new_tokens": 1}', JSON),
    (b'{"model": "fake", "prompt": "a", "suffix": "b"}', JSON),
    (b'{"model": "fake", "prompt": "a", "suffix": null}', JSON),
    (b'{"model": "fake", "prompt": "a", "stop": ["a", "b", "c"]}', JSON),
    (b'{"model": "fake", "prompt": "a", "stop": [1]}', JSON),
    (b'{"model": "fake", "prompt": "a", "best_of": 1, "n": 2}', JSON),
    (b'{"model": "fake", "prompt": "a", "stream_options": {"include_usage": true}}', JSON),
    (b'{"model": "fake", "prompt": "a", "stream_options": {"other": true}}', JSON),
    (b'{"model": "fake", "prompt": "a", "speculative": {"num_steps": "x"}}', JSON),
    (b'{"model": "fake", "prompt": "a", "logit_bias": {"x": 1}}', JSON),
    (b'{"model": "fake", "prompt": "' + b"a" * 300_000 + b'"}', JSON),
]


@pytest.mark.parametrize(("content", "kind"), BODIES)
def test_body_is_read_and_refused_as_fastapi_does(content: bytes, kind: str | None) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    ours, theirs = (
        asyncio.run(answers(app_of(route), content, headers))
        for route in (LimitedRoute, SolvedRoute)
    )
    assert ours == theirs


@pytest.mark.parametrize(("content", "kind"), BODIES[:4])
def test_body_of_a_kind_of_json_is_taken(content: bytes, kind: str) -> None:
    status, found, _ = asyncio.run(answers(app_of(LimitedRoute), content, {"Content-Type": kind}))
    assert status == 200
    assert (found[0]["prompt"], found[1]) == ([[1, 2]], "/v1/completions")


@pytest.mark.parametrize("route", [SolvedRoute, LimitedRoute])
def test_client_that_leaves_within_its_body_is_no_error_of_the_server(
    route: type[APIRoute],
) -> None:
    arrived = iter([{"type": "http.request", "body": b"{", "more_body": True}])
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return next(arrived, {"type": "http.disconnect"})

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b""}
    scope["headers"] = [(b"content-type", JSON.encode())]  # type: ignore[assignment]
    asyncio.run(app_of(route)(scope, receive, send))
    assert sent[0]["status"] == 400


def test_schema_of_a_direct_route_has_its_body() -> None:
    operation = app_of(LimitedRoute).openapi()["paths"]["/v1/completions"]["post"]
    assert operation["requestBody"]["content"][JSON]["schema"]["$ref"].endswith("CompletionRequest")


def test_token_ids_are_taken_without_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[Any] = []

    async def to_thread(work: Any, *arguments: Any) -> Any:
        threads.append(work)
        return work(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    engine = FakeEngine()
    assert asyncio.run(encode_prompts(engine, [[1, 2], [3]])) == [[1, 2], [3]]
    assert not threads
    assert asyncio.run(encode_prompts(engine, [[1, 2], "a"])) == [[1, 2], [ord("a") - 33]]
    assert len(threads) == 1


def test_fingerprint_follows_the_configuration() -> None:
    service, config = Service(), EngineConfig()
    first = service.fingerprint(config)
    assert service.fingerprint(config) == first
    assert service.fingerprint(EngineConfig(model=ModelConfig(model="other"))) != first
    assert service.fingerprint(EngineConfig()) == first


REQUESTS = [
    b"POST / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"HEAD / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST / HTTP/1.0\r\nHost: x\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
]
PIECES = (b"data: a\n\n", b"", b"data: " + b"b" * 5000 + b"\n\n", b"", b"c")


@pytest.mark.parametrize("request_bytes", REQUESTS)
@pytest.mark.parametrize("has_length", [False, True])
def test_answer_has_the_bytes_that_h11_gives_it(request_bytes: bytes, has_length: bool) -> None:
    length = [("content-length", str(sum(map(len, PIECES))))] if has_length else []
    sent = []
    for connection in (StrictConnection(10_000), h11.Connection(h11.SERVER)):
        bytes_of: list[bytes | None] = []
        for _ in range(2):  # the second with a length, after one with chunks
            connection.receive_data(request_bytes)
            while connection.next_event() not in (h11.NEED_DATA, h11.PAUSED):
                pass
            headers = [("content-type", "text/event-stream"), *length]
            bytes_of.append(connection.send(h11.Response(status_code=200, headers=headers)))
            is_head = request_bytes.startswith(b"HEAD")
            bytes_of += [connection.send(h11.Data(data=b"" if is_head else p)) for p in PIECES]
            bytes_of.append(connection.send(h11.EndOfMessage()))
            if connection.our_state is not h11.DONE:
                break
            connection.start_next_cycle()
            length = length or [("content-length", str(sum(map(len, PIECES))))]
        length = length if has_length else []
        sent.append(b"".join(filter(None, bytes_of)))
    assert sent[0] == sent[1]


def test_head_of_an_answer_is_sent_with_its_first_piece() -> None:
    connection = StrictConnection(10_000)
    connection.receive_data(REQUESTS[0])
    while connection.next_event() not in (h11.NEED_DATA, h11.PAUSED):
        pass
    assert connection.send(h11.Response(status_code=200, headers=[])) == b""
    first = connection.send(h11.Data(data=b"a"))
    assert first.startswith(b"HTTP/1.1 200 ")
    assert first.endswith(b"\r\n\r\n1\r\na\r\n")
    assert connection.send(h11.Data(data=b"b")) == b"1\r\nb\r\n"


def test_chunk_after_the_end_is_an_error_as_in_h11() -> None:
    connection = StrictConnection(10_000)
    connection.receive_data(REQUESTS[0])
    while connection.next_event() not in (h11.NEED_DATA, h11.PAUSED):
        pass
    connection.send(h11.Response(status_code=200, headers=[]))
    connection.send(h11.EndOfMessage())
    with pytest.raises(h11.LocalProtocolError):
        connection.send(h11.Data(data=b"x"))


@pytest.mark.parametrize("fails", [False, True])
def test_end_of_a_stream_ends_the_answer_whether_it_fails_or_not(fails: bool) -> None:
    async def events() -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        if fails:
            raise ApiError(503, "gone")

    async def receive() -> Any:
        await asyncio.Event().wait()

    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)

    asyncio.run(EventStream(events())({"type": "http"}, receive, send))
    told = [one["body"] for one in messages if "body" in one]
    assert [told[0], told[-1]] == [b"data: 1\n\n", b""]
    assert told[-2] == (b"data: [DONE]\n\n" if fails else told[0])
    assert [one.get("more_body") for one in messages] == [None, *[True] * (len(told) - 1), False]
