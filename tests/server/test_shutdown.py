"""A server that is told to stop: who is still served, who is told to go elsewhere, what is left."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from specengine.core.config import ServerConfig
from specengine.server.app import create_app
from specengine.server.listening import address, listen
from specengine.server.run import Server, make_server
from specengine.server.service import Service
from tests.server.conftest import FakeEngine, refusal
from tests.support.waiting import until

TEXT = "/v1/completions"
BODY = {"model": "fake", "prompt": "x", "max_tokens": 190}


@contextmanager
def running(seconds: float, engine: FakeEngine) -> Iterator[tuple[Server, httpx.Client]]:
    """A server, which has ended at the end."""
    service = Service()
    service.engine = engine
    config = ServerConfig(port=0, log_level="warning", shutdown_timeout=seconds)
    listener = listen(config)
    server = make_server(create_app(service), config)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        with httpx.Client(base_url=address(listener), timeout=60) as http:
            yield server, http
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


def test_requests_that_run_finish_while_new_ones_are_refused() -> None:
    engine = FakeEngine(holds_after=1)
    with running(60, engine) as (server, http):
        with http.stream("POST", TEXT, json={**BODY, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            server.should_exit = True
            until(lambda: http.get("/ready").status_code == 503)
            refused = http.post(TEXT, json=BODY)  # on a new connection
            assert refusal(refused, 503)["code"] == "stopping"
            assert refused.headers["retry-after"] == "1"
            assert http.get("/health").status_code == 200
            engine.holds_after = 1000
            text = "".join(lines)
        assert '"finish_reason":"stop"' in text
        assert "error" not in text
        assert text.endswith("[DONE]")
    assert not engine.is_ready  # it was ended as well


@pytest.mark.parametrize("stream", [False, True])
def test_requests_that_take_too_long_are_told(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """And no stack trace stands in the log."""
    engine = FakeEngine(holds_after=1)
    answers: list[httpx.Response] = []
    with running(0.3, engine) as (server, http):

        def ask() -> None:
            answers.append(http.post(TEXT, json={**BODY, "stream": stream}))

        thread = threading.Thread(target=ask)
        thread.start()
        until(lambda: engine.prompts)
        server.should_exit = True
        thread.join(60)
    (answer,) = answers
    if stream:
        *_, error, done = (line for line in answer.text.split("\n\n") if line)
        assert "the engine has stopped" in error
        assert done == "data: [DONE]"
    else:
        assert refusal(answer, 503)["code"] == "stopped"
        assert answer.headers["retry-after"] == "1"
    assert "Traceback" not in caplog.text


def test_nothing_to_finish_ends_at_once() -> None:
    with running(1000, FakeEngine()) as (server, http):
        assert http.get("/ready").status_code == 200
        server.should_exit = True


def test_background_server_leaves_its_engine(engine: Any) -> None:
    service = Service()
    service.engine = engine
    config = ServerConfig(port=0, log_level="warning")
    listener = listen(config)
    server = make_server(create_app(service), config, stops_engine=False)
    server.should_exit = True
    server.run([listener])
    assert engine.is_ready
