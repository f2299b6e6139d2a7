"""`specengine serve` as a process of its own, told to stop."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.test_server import wait_for

ROOT = Path(__file__).parents[2]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    command = [sys.executable, "-m", "specengine", "serve", "tiny", "--port", "0"]
    command += ["--device", "cpu", "--max-total-tokens", "4096", "--shutdown-timeout", "20"]
    log = tmp_path / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, stderr=file)
    try:
        wait_for(lambda: "listening on " in log.read_text())
        (url,) = re.findall(r"listening on (\S+)", log.read_text())
        wait_for(lambda: httpx.get(f"{url}/ready").status_code == 200, 120)
        yield process, url
    finally:
        process.kill()
        process.wait()


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def test_sigterm_under_load_finishes_requests_and_leaves_no_child(
    server: tuple[subprocess.Popen[bytes], str],
) -> None:
    process, url = server
    text = {"model": "tiny", "prompt": "a", "max_tokens": 100, "ignore_eos": True}
    shaped = {"structured_outputs": {"regex": "[ab]{40}"}}
    assert httpx.post(f"{url}/v1/completions", json=text | shaped).status_code == 200
    started = children(process.pid)
    assert started  # a process that compiles grammars
    with httpx.stream("POST", f"{url}/v1/completions", json=text | {"stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        rest = "".join(lines)
    assert '"finish_reason":"length"' in rest
    assert rest.endswith("[DONE]")
    assert process.wait(60) == -signal.SIGTERM
    for child in started:
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)
