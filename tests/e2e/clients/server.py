"""`specengine serve` as its own process, for clients that run in processes of theirs."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
READY_AFTER = 300.0  # seconds, at most
# Tiny drafts in every round, and its template shows tools: its own one has none.
FLAGS = (
    *("--speculative-algorithm", "EAGLE3", "--no-speculative-adaptive"),
    *("--dtype", "float32", "--max-total-tokens", "16384"),
    *("--chat-template", str(HERE / "tools.jinja"), "--tool-call-parser", "hermes"),
)


@contextmanager
def served(model: str, log: Path) -> Iterator[str]:
    """The address of a server of `model`. log: gets what the server says."""
    port = _free_port()
    command = [sys.executable, "-m", "specengine", "serve", model, "--port", str(port), *FLAGS]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(url, process, log)
            yield url
        finally:
            process.terminate()
            process.wait(60)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_AFTER
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended; see {log}")
        try:
            urllib.request.urlopen(url + "/ready", timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError(f"the server is not ready; see {log}")
