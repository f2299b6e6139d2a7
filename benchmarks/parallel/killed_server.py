"""A server of two engines that share experts, a GPU each; one is killed amid requests. How long
until the requests have their error, and until the server answers again?

    NCCL_NVLS_ENABLE=0 python benchmarks/parallel/killed_server.py --out $OUT/killed_server.json

Needs no weights. --device cpu --small tries the script.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.parallel.shapes import write_shape  # noqa: E402
from specengine.server.metrics_shared import VARIABLE  # noqa: E402

PORT = 9137
BODY = {"model": "m", "prompt": "Once upon a time", "temperature": 0, "ignore_eos": True}


def ask(max_tokens: int) -> tuple[int, str]:
    """Status and the end of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=120)
    body = json.dumps({**BODY, "max_tokens": max_tokens})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    return response.status, response.read().decode()[-160:]


def is_ready() -> bool:
    try:
        connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=5)
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False


def until(holds: Callable[[], bool], limit: float) -> float:
    """Seconds; infinite where it did not come to that."""
    start = time.monotonic()
    while not holds():
        if time.monotonic() - start > limit:
            return float("inf")
        time.sleep(0.05)
    return time.monotonic() - start


def engines(server: int) -> list[int]:
    tasks = Path(f"/proc/{server}/task").glob("*/children")
    children = [int(child) for task in tasks for child in task.read_text().split()]
    return sorted(one for one in children if not is_front_end(one))


def is_front_end(pid: int) -> bool:
    return f"\0{VARIABLE}=".encode() in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()


def measure(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    found: dict[str, Any] = {"ready after": round(until(is_ready, 120), 1)}
    before, ended = engines(process.pid), list[tuple[float, int, str]]()

    def one() -> None:
        status, said = ask(1500)
        ended.append((time.monotonic(), status, said))

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(3.0)
    found["ended too early"] = len(ended)
    killed = time.monotonic()
    os.kill(before[1], signal.SIGKILL)
    for thread in threads:
        thread.join(60)
    found["requests have ended after"] = [round(when - killed, 2) for when, _, _ in ended]
    found["with"] = sorted({(status, said) for _, status, said in ended})
    gone = until(lambda: before[0] not in engines(process.pid), 30)
    found["the other engine has ended after"] = round(time.monotonic() - killed, 2)
    found["was it ended"] = gone < float("inf")
    until(lambda: is_ready() and len(engines(process.pid)) == 2, 90)
    found["serves again after"] = round(time.monotonic() - killed, 1)
    found["and answers"] = ask(8)[0]
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        name = "small experts" if args.small else "30b-a3b, 8 layers, few tokens"
        command = [sys.executable, "-m", "specengine", "serve", write_shape(name, Path(folder))]
        command += ["--load-format", "dummy", "--device", args.device, "--port", str(PORT)]
        command += ["--served-model-name", "m", "--api-workers", "1", "--max-restarts", "5"]
        command += ["--dp-size", "2", "--enable-dp-attention", "--max-total-tokens", "16384"]
        process = subprocess.Popen(command, cwd=ROOT)
        try:
            found = measure(process)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            finally:
                process.kill()
    print(json.dumps(found, indent=1), flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
