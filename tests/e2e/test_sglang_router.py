"""Two servers behind sglang-router, as docs/scaling.md starts it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.processes import ROOT, Served, serving
from tests.support.waiting import until

pytest.importorskip("sglang_router")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# The router shows it to the workers, whose /server_info then tells it the model's name.
KEY = "routers"
BEARER = {"Authorization": f"Bearer {KEY}"}
SHARED = "Once upon a time there was a small house by the sea. " * 8


@dataclass
class Routed:
    url: str
    workers: list[Served]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routed]:
    folders = [tmp_path_factory.mktemp(name) for name in ("one", "other", "router")]
    workers = ("--api-workers", "1", "--admin-api-key", KEY)
    with (
        serving(folders[0], *workers) as one,
        serving(folders[1], *workers) as other,
        routing(folders[2], one.url, other.url) as url,
    ):
        yield Routed(url, [one, other])


@contextmanager
def routing(folder: Path, *urls: str) -> Iterator[str]:
    """The router as a process."""
    port = free_port()
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--prometheus-port", str(free_port())]
    command += ["--worker-urls", *urls, "--policy", "cache_aware", "--api-key", KEY]
    url = f"http://127.0.0.1:{port}"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    try:
        until(lambda: knows_the_model(url), 60)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def knows_the_model(url: str) -> bool:
    try:
        models = httpx.get(f"{url}/v1/models", headers=BEARER).json()["data"]
    except (httpx.HTTPError, ValueError, KeyError):
        return False
    return [one["id"] for one in models] == ["tiny"]


def post(url: str, path: str, **body: Any) -> Any:
    answer = httpx.post(url + path, json=body, headers=BEARER, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


MESSAGES = [{"role": "user", "content": "Give me five tips."}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "tiny", "prompt": "Once", "max_tokens": 9, "temperature": 0},
    "/v1/chat/completions": {"model": "tiny", "messages": MESSAGES, "max_tokens": 9},
    "/v1/responses": {"model": "tiny", "input": "Hi", "max_output_tokens": 9, "store": False},
    "/generate": {"text": "Once", "sampling_params": {"max_new_tokens": 9, "temperature": 0}},
}


@pytest.mark.parametrize("path", BODIES)
def test_every_endpoint_answers_through_the_router(routed: Routed, path: str) -> None:
    assert post(routed.url, path, **BODIES[path])


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_answers_are_those_of_a_worker(routed: Routed, path: str) -> None:
    def text(answer: Any) -> str:
        return str(answer["text"] if "text" in answer else answer["choices"][0]["text"])

    direct = post(routed.workers[0].url, path, **BODIES[path])
    assert text(post(routed.url, path, **BODIES[path])) == text(direct)


def test_streams_pass(routed: Routed) -> None:
    body = BODIES["/v1/chat/completions"] | {"stream": True, "temperature": 0}
    url = f"{routed.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, headers=BEARER, timeout=60) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    deltas = [json.loads(one)["choices"][0]["delta"].get("content", "") for one in lines[:-1]]
    assert len("".join(deltas)) > 3


def test_one_conversation_stays_with_one_worker(routed: Routed) -> None:
    for number in range(6):
        post(routed.url, "/generate", text=SHARED + str(number), sampling_params=GREEDY)
    hits = [one.metric("prefix_cache_hit_tokens_total") for one in routed.workers]
    assert max(hits) > 300


GREEDY = {"max_new_tokens": 4, "temperature": 0}


def test_the_router_tells_of_the_model(routed: Routed) -> None:
    told = httpx.get(f"{routed.url}/get_model_info", headers=BEARER).json()
    assert told["is_generation"] is True
    assert told["model_path"] == "tiny"
    assert httpx.get(f"{routed.url}/health").status_code == 200
