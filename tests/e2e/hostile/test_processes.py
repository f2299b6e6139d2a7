"""A server of several processes, of which one after the other is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.hostile import soak
from tests.e2e.hostile.watch import KEY
from tests.support.kept import Kept
from tests.support.processes import Served, children_of, is_alive, serving
from tests.support.waiting import until

LONG = {"max_tokens": 3000}


@pytest.fixture
def spread(served: Served) -> Iterator[list[httpx.Client]]:
    """Connections to both front ends: the first, and the last."""
    clients = [httpx.Client(base_url=served.url, timeout=60) for _ in range(5)]
    for one in clients:  # each front end learns by itself that the engine serves
        until(lambda one=one: one.get("/ready").status_code == 200)
    yield clients
    for one in clients:
        one.close()


def idle(served: Served) -> bool:
    text = served.get("/metrics").text
    running, kv = served.metric("num_requests_running", text), served.metric("kv_usage_ratio", text)
    return running == 0 and kv == 0


def test_every_front_end_tells_of_the_whole_server(
    served: Served, spread: list[httpx.Client]
) -> None:
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 4}
    before = served.metric("request_choices_total")
    for one in spread:
        assert one.post("/v1/completions", json=body).status_code == 200
    first, *_, last = spread
    found = [served.metric("request_choices_total", c.get("/metrics").text) for c in (first, last)]
    assert found == [before + 5] * 2
    data = [client.get("/dashboard/data").json() for client in (first, last)]
    assert data[0]["finished"] == data[1]["finished"]
    made = {client.get("/v1/models").json()["data"][0]["created"] for client in spread}
    assert len(made) == 1


def test_server_info_counts_what_was_just_done(served: Served, spread: list[httpx.Client]) -> None:
    """Though no front end was asked for /metrics meanwhile, of which the counters are a part."""
    until(lambda: idle(served))
    before = {client: state_at(client)["num_generated_tokens"] for client in spread}
    assert served.complete(max_tokens=8).status_code == 200
    for client in spread:
        state = state_at(client)
        found = state["num_slots"], state["num_generated_tokens"] - before[client]
        assert found == (soak.SLOTS, 8)


def state_at(client: httpx.Client) -> dict[str, Any]:
    """The engine's, as a front end tells it."""
    headers = {"Authorization": f"Bearer {KEY}"}
    state: dict[str, Any] = client.get("/server_info", headers=headers).json()["state"]
    return state


def test_threads_of_the_engine_leave_the_cores_to_front_ends(served: Served) -> None:
    environment = Path(f"/proc/{served.engine}/environ").read_bytes().split(b"\0")
    expected = os.environ.get("OMP_WAIT_POLICY", "PASSIVE")
    assert f"OMP_WAIT_POLICY={expected}".encode() in environment


def test_front_ends_can_give_back_the_memory_of_large_bodies(served: Served) -> None:
    """Python's own allocator keeps arenas in which a few small objects live."""
    expected = os.environ.get("PYTHONMALLOC", "malloc")
    for one in served.front_ends():
        environment = Path(f"/proc/{one}/environ").read_bytes().split(b"\0")
        assert f"PYTHONMALLOC={expected}".encode() in environment


def test_front_end_that_is_killed_costs_its_own_requests_alone(served: Served) -> None:
    until(lambda: len(served.front_ends()) == 2 and idle(served))
    aborts = served.metric("request_aborts_total")
    with served.stream(**LONG) as events:
        next(events)
        victims = set(served.front_ends())
        for victim in victims:  # one of them has this stream
            os.kill(victim, signal.SIGKILL)
        with pytest.raises(httpx.RemoteProtocolError):
            list(events)
    # Until the supervisor has seen it, it may still give them connections.
    until(lambda: not any(Path(f"/proc/{one}").exists() for one in victims))
    assert served.complete().status_code == 200  # it waited for a front end
    until(lambda: idle(served))
    assert served.metric("request_aborts_total") == aborts + 1
    until(lambda: len(served.front_ends()) == 2)


def test_engine_that_is_killed_fails_its_requests_and_is_started_again(served: Served) -> None:
    until(served.is_ready)
    expected = served.complete().json()["choices"][0]["text"]
    engine = served.engine
    with served.stream(**LONG) as events, ThreadPoolExecutor() as pool:
        whole = pool.submit(served.complete, **LONG)
        next(events)
        until(lambda: served.metric("num_requests_running") == 2)
        os.kill(engine, signal.SIGKILL)
        *_, last = events
        assert last["error"]["code"] == "stopped"
        assert "is being restarted" in last["error"]["message"]
        answer = whole.result()
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "stopped"
    health = served.get("/health")
    assert (health.status_code, health.json()) == (503, {"status": "failed"})
    assert served.complete().status_code == 503
    until(served.is_ready)
    assert served.get("/health").status_code == 200
    assert served.complete().json()["choices"][0]["text"] == expected
    assert served.engine != engine


def test_client_that_never_reads_stops_nobody(served: Served) -> None:
    until(lambda: served.is_ready() and idle(served))
    host, port = served.url.removeprefix("http://").split(":")
    body = b'{"model":"tiny","prompt":"a","max_tokens":3000,"ignore_eos":true,"stream":true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: %d\r\n\r\n" % len(body)
    silent = socket.socket()
    silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    silent.connect((host, int(port)))
    silent.sendall(head + body)
    until(lambda: served.metric("num_requests_running") == 1)
    for _ in range(5):
        assert served.complete().status_code == 200
    silent.close()
    until(lambda: idle(served))


def test_sigterm_under_load_finishes_requests_and_leaves_no_child(
    servers: Kept[Served], served: Served
) -> None:
    until(lambda: served.is_ready() and idle(served))
    fields: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True}
    shaped = {"structured_outputs": {"regex": "[ab]{40}"}}
    assert served.complete(**fields, **shaped).status_code == 200
    started = [*served.children(), *children_of(served.engine)]
    assert len(started) > 3  # among them a process that compiles grammars
    with served.stream(**fields) as events:
        next(events)
        served.process.send_signal(signal.SIGTERM)
        *_, last = events
    assert last["choices"][0]["finish_reason"] == "length"
    assert served.process.wait(120) == -signal.SIGTERM
    servers.end()
    until(lambda: not any(map(is_alive, started)))


@pytest.mark.slow
def test_step_that_hangs_is_noticed(tmp_path: Path) -> None:
    """The engine's process is stopped, which is how a step that hangs looks from outside."""
    with serving(tmp_path, "--watchdog-timeout", "2", "--api-workers", "1") as served:
        engine = served.engine
        with served.stream(**LONG) as events:
            next(events)
            os.kill(engine, signal.SIGSTOP)
            *_, last = events
        assert last["error"]["code"] == "stopped"
        assert served.get("/health").status_code == 503
        assert "takes more than 2 s" in served.log.read_text()
        until(served.is_ready)
        assert served.complete().status_code == 200
        assert not is_alive(engine)


@pytest.mark.slow
def test_front_end_that_hangs_is_noticed(tmp_path: Path) -> None:
    with serving(tmp_path, "--watchdog-timeout", "2", "--api-workers", "1") as served:
        (hung,) = served.front_ends()
        os.kill(hung, signal.SIGSTOP)
        with pytest.raises(httpx.TransportError):
            served.complete()  # it was handed to the one that hangs
        assert served.complete().status_code == 200  # by the next one
        assert not is_alive(hung)


@pytest.mark.slow
def test_engine_that_ends_again_and_again_ends_the_server(tmp_path: Path) -> None:
    with serving(tmp_path, "--max-restarts", "1", "--api-workers", "1") as served:
        for _ in range(2):
            until(served.is_ready)
            os.kill(served.engine, signal.SIGKILL)
            until(lambda: not connects_or_healthy(served))
        assert served.process.wait(60) == 1
        assert "has ended 2 times" in served.log.read_text()


def connects_or_healthy(served: Served) -> bool:
    try:
        return served.get("/health").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.slow
def test_no_child_outlives_the_supervisor(tmp_path: Path) -> None:
    with serving(tmp_path, "--api-workers", "2") as served, served.stream(**LONG) as events:
        next(events)
        children = served.children()
        assert len(children) == 3
        served.process.kill()
        until(lambda: not any(map(is_alive, children)))


@pytest.mark.slow
def test_full_disk_for_the_log_stops_nothing(tmp_path: Path) -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    with serving(tmp_path, "--api-workers", "1", log=Path("/dev/full"), port=port) as served:
        for _ in range(20):
            assert served.complete().status_code == 200
        os.kill(served.engine, signal.SIGKILL)
        until(lambda: served.get("/health").status_code == 503)
        until(served.is_ready)
        assert served.complete().status_code == 200


@pytest.mark.slow
def test_too_little_kv_finishes_what_fits_and_refuses_the_rest(tmp_path: Path) -> None:
    flags = ("--api-workers", "2", "--max-total-tokens", "256", "--page-size", "1")
    with serving(tmp_path, *flags) as served, ThreadPoolExecutor(4) as pool:
        # Four prompts a request come at once, and fit until they have some ten tokens more: however
        # slowly the requests follow each other, some are retracted.
        body: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True}
        prompts = [[[4 * k + j] * 50 for j in range(1, 5)] for k in range(4)]
        answers = list(pool.map(lambda four: served.complete(prompt=four, **body), prompts))
        assert {answer.status_code for answer in answers} == {200}
        assert {answer.json()["usage"]["completion_tokens"] for answer in answers} == {4 * 100}
        assert all(len(answer.json()["choices"]) == 4 for answer in answers)
        assert served.metric("request_retractions_total") > 0
        too_long = served.complete(prompt=[1] * 300, **body)
        assert too_long.status_code == 400
        until(lambda: idle(served))


@pytest.mark.slow
def test_model_that_cannot_be_loaded_ends_the_server(tmp_path: Path) -> None:
    import sys

    command = [sys.executable, "-m", "specengine", "serve", str(tmp_path / "none"), "--port", "0"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert found.returncode == 1
    assert "error: " in found.stderr.splitlines()[-1]


@pytest.mark.slow
def test_sigterm_under_load_refuses_new_requests_at_every_front_end(tmp_path: Path) -> None:
    flags = ("--api-workers", "2", "--shutdown-timeout", "60")
    with serving(tmp_path, *flags) as served, served.stream(max_tokens=1500) as events:
        next(events)
        children = served.children()
        served.process.send_signal(signal.SIGTERM)
        until(lambda: served.get("/ready").status_code == 503)
        refused = [served.complete() for _ in range(8)]
        assert {one.status_code for one in refused} == {503}
        assert {one.headers["retry-after"] for one in refused} == {"1"}
        assert {one.json()["error"]["code"] for one in refused} == {"stopping"}
        *_, last = events
        assert last["choices"][0]["finish_reason"] == "length"
        assert served.process.wait(60) == -signal.SIGTERM
        assert not any(map(is_alive, children))


@pytest.mark.slow
def test_sigterm_tells_requests_that_take_too_long(tmp_path: Path) -> None:
    flags = ("--api-workers", "2", "--shutdown-timeout", "0.2")
    with serving(tmp_path, *flags) as served, served.stream(**LONG) as events:
        next(events)
        ended = threading.Thread(target=served.process.send_signal, args=(signal.SIGTERM,))
        ended.start()
        *_, last = events
        assert last["error"]["message"] == "the engine is shutting down"
        assert served.process.wait(60) == -signal.SIGTERM
