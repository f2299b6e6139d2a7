"""One small request every 50 ms: `python -m tests.e2e.hostile.probe URL PID...`, until its input
ends. PID: processes of the server.

It prints a line of JSON a request. It starts each one on time, however long the last one takes.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from time import monotonic
from typing import Any

EVERY = 0.05  # seconds
BODY = json.dumps({"model": "tiny", "prompt": "Hi", "max_tokens": 1, "priority": 0}).encode()
LINES = (
    b"POST /v1/completions HTTP/1.1",
    b"Host: probe",
    b"Content-Type: application/json",
    b"Connection: close",
    b"Content-Length: %d" % len(BODY),
)
REQUEST = b"\r\n".join(LINES) + b"\r\n\r\n" + BODY


def starved() -> float:
    """Seconds so far that the main threads of these processes were ready to run and had no core."""
    return sum(map(_waited, ("self", *sys.argv[2:])))


def _waited(pid: str) -> float:
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except OSError:  # it has ended
        return 0.0


async def probe(host: str, port: int) -> None:
    began, before = monotonic(), starved()
    status: Any
    try:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(REQUEST)
        answer = await reader.read()
        writer.close()
        status = int(answer.split(b" ", 2)[1]) if answer else "closed"
    except OSError as error:
        status = repr(error)
    row = {"at": began, "seconds": monotonic() - began, "starved": starved() - before}
    print(json.dumps(row | {"status": status}), flush=True)


async def main(host: str, port: int) -> None:
    ended = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    running: set[asyncio.Task[None]] = set()
    at = monotonic()
    while not ended.done():
        task = asyncio.create_task(probe(host, port))
        running.add(task)
        task.add_done_callback(running.discard)
        at = max(at + EVERY, monotonic())
        await asyncio.sleep(at - monotonic())
    await asyncio.gather(*running)


if __name__ == "__main__":
    host, _, port = sys.argv[1].removeprefix("http://").partition(":")
    asyncio.run(main(host, int(port)))
