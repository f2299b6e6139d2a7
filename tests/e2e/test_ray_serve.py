"""deploy/ray.yaml on a Ray of this machine: the answers of one engine, from two replicas."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.support.live_server import live_server
from tests.support.processes import ROOT
from tests.support.waiting import until

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FLAGS: dict[str, Any] = {"model": "tiny", "dtype": "float32", "max_total_tokens": 4096}
SPEC = {"speculative_algorithm": "EAGLE3", "speculative_adaptive": False}
SHARED = "Once upon a time there was a small house by the sea. " * 8
# It starts a Ray of its own, and takes it down with itself.
RUN = "import sys; from ray.serve.scripts import cli; sys.argv[0] = 'serve'; cli()"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("ray")
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    config = yaml.safe_load((ROOT / "deploy/ray.yaml").read_text())
    config["http_options"] |= {"host": "127.0.0.1", "port": port}
    (application,) = config["applications"]
    application["args"] |= FLAGS | SPEC | {"device": "cpu", "front_ends": 2}
    (folder / "ray.yaml").write_text(yaml.safe_dump(config))
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-c", RUN, "run", str(folder / "ray.yaml")]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, stderr=log, stdout=log, env=os.environ | quiet
        )
    try:
        found = f"http://127.0.0.1:{port}"
        until(lambda: is_ready(found), 240)
        yield found
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=10).status_code == 200
    except httpx.TransportError:
        return False


def complete(url: str, **more: Any) -> httpx.Response:
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 24, "temperature": 0, **more}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=120)


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_answers_are_those_of_one_engine(url: str) -> None:
    prompts = ["Once", SHARED, SHARED + "One day", "Give me five tips."]
    with live_server(FLAGS, None) as alone:
        expected = [text_of(complete(alone.url, prompt=prompt)) for prompt in prompts]
    assert [text_of(complete(url, prompt=prompt)) for prompt in prompts] == expected
    assert [text_of(complete(url, prompt=prompt)) for prompt in prompts] == expected
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    shaped = text_of(complete(url, structured_outputs={"json": schema}, max_tokens=60))
    assert isinstance(json.loads(shaped)["a"], int)


def test_streams_come_in_pieces(url: str) -> None:
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 40, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert events[-1] == "[DONE]"
    texts = [json.loads(one)["choices"][0]["text"] for one in events[:-1]]
    assert len(texts) > 3
    assert "".join(texts) == text_of(complete(url, max_tokens=40))


def test_prompts_go_where_their_beginning_is(url: str) -> None:
    """By one front end: each keeps its own record. A connection stays with one only by chance, so
    most of the later requests find the beginning, not all."""
    cached = []
    for number in range(8):
        usage = complete(url, prompt=SHARED + f"Number {number}").json()["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert sum(count > 50 for count in cached) >= 5, cached


def test_client_that_leaves_ends_its_request(url: str) -> None:
    body = {"model": "tiny", "prompt": "a", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        next(answer.iter_lines())
    until(lambda: 'specengine:num_requests_running{model_name="tiny"} 0' in metrics(url), 30)


def metrics(url: str) -> str:
    return httpx.get(f"{url}/metrics", timeout=30).text


def engines() -> list[int]:
    """Processes of replicas, by the title that Ray gives them."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"ServeReplica:specengine:engine-" in entry.read_bytes():
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


def test_replica_that_is_killed_is_started_again_and_the_other_serves(url: str) -> None:
    before = engines()
    assert len(before) == 2
    expected = text_of(complete(url))
    os.kill(before[0], signal.SIGKILL)
    answers = [complete(url, prompt=f"{number}") for number in range(12)]
    assert {one.status_code for one in answers} <= {200, 503}
    assert text_of(complete(url)) == expected
    until(lambda: len(engines()) == 2 and before[0] not in engines(), 120)
    until(lambda: all(complete(url, prompt=str(n)).status_code == 200 for n in range(6)), 60)
