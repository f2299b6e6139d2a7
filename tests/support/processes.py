"""`specengine serve` as processes of their own, for tests that kill them."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from specengine.server.metrics_shared import VARIABLE
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
TINY = ("--device", "cpu", "--dtype", "float32", "--max-total-tokens", "4096")


@dataclass
class Served:
    """A server. Each call has a connection of its own. verify: httpx's, where it speaks TLS."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    verify: Any = True

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, verify=self.verify)

    def complete(self, **more: Any) -> httpx.Response:
        body = {"model": "tiny", "prompt": "Once", "max_tokens": 8, "temperature": 0, **more}
        url = f"{self.url}/v1/completions"
        return httpx.post(url, json=body, timeout=120, verify=self.verify)

    @contextmanager
    def stream(self, **more: Any) -> Iterator[Iterator[dict[str, Any]]]:
        """The events of an answer. After the first, it is being decoded."""
        body = {"model": "tiny", "prompt": "Once", "temperature": 0, "ignore_eos": True, **more}
        url = f"{self.url}/v1/completions"
        asked = httpx.stream(
            "POST", url, json=body | {"stream": True}, timeout=120, verify=self.verify
        )
        with asked as response:
            lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
            yield (json.loads(line) for line in lines if line != "[DONE]")

    def is_ready(self) -> bool:
        """Not while a front end is being replaced, which resets connections."""
        try:
            return self.get("/ready").status_code == 200
        except httpx.TransportError:
            return False

    def metric(self, name: str, text: str | None = None) -> float:
        """The sum of its samples."""
        text = self.get("/metrics").text if text is None else text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == f"specengine:{name}"
        )

    def children(self) -> list[int]:
        return children_of(self.process.pid)

    @property
    def engine(self) -> int:
        """Its process."""
        (found,) = self.engines()
        return found

    def engines(self) -> list[int]:
        """Those that serve or load."""
        return sorted(one for one in self.children() if is_alive(one) and not is_front_end(one))

    def front_ends(self) -> list[int]:
        return [one for one in self.children() if is_front_end(one)]


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def is_front_end(pid: int) -> bool:
    """By where it counts for all of them. Whether PyTorch is loaded says nothing: tokenizers of
    some versions of transformers load it too."""
    try:
        return f"\0{VARIABLE}=".encode() in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextmanager
def serving(
    folder: Path,
    *flags: str,
    log: Path | None = None,
    port: int = 0,
    model: str = "tiny",
    verify: Any = None,
) -> Iterator[Served]:
    """A server that is ready. log: where its standard error goes; its port must be told then.
    verify: httpx's, of a server that speaks TLS."""
    command = [sys.executable, "-m", "specengine", "serve", model, "--port", str(port)]
    log = log or folder / "log"
    with log.open("wb") as file:
        process = subprocess.Popen([*command, *TINY, *flags], cwd=ROOT, stderr=file)
    try:
        if not port:
            found = until(lambda: re.findall(r"listening on \S+:(\d+)", log.read_text()))
            port = int(found[0])
        scheme = "http" if verify is None else "https"
        served = Served(process, f"{scheme}://127.0.0.1:{port}", log, verify or True)
        until(lambda: connects(port) and served.is_ready())
        yield served
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        finally:
            process.kill()
            process.wait()


def connects(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0
