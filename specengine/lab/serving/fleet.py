"""Client processes: started, given their share, listened to while they run, and read at the end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from threading import Thread
from time import perf_counter

import msgspec

from specengine.core.errors import SpecEngineError
from specengine.lab.serving.client import READY
from specengine.lab.serving.records import ClientJob, ClientReport

_MODULE = "specengine.lab.serving.client"
_MARGIN = 0.05  # seconds from the word to the start
Tell = Callable[[int, int], object]  # how many requests have ended, with how many tokens


@dataclass(frozen=True)
class ClientLine:
    """A line of a client; None at its end."""

    client: int
    line: str | None


def run_clients(jobs: list[ClientJob], tell: Tell) -> list[ClientReport]:
    """All begin at the same moment. Raises SpecEngineError where a client fails."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        for number, job in enumerate(jobs):
            (folder / f"{number}.job").write_bytes(msgspec.msgpack.encode(job))
        with _clients(folder, len(jobs)) as clients:
            _follow(clients, tell)
        return [
            msgspec.msgpack.decode((folder / f"{number}.result").read_bytes(), type=ClientReport)
            for number in range(len(jobs))
        ]


def _follow(clients: list[subprocess.Popen[str]], tell: Tell) -> None:
    """Start them once all are ready, and wait for their ends."""
    said: SimpleQueue[ClientLine] = SimpleQueue()
    for number, client in enumerate(clients):
        Thread(target=_listen, args=(number, client, said), daemon=True).start()
    ended, tokens = [0] * len(clients), [0] * len(clients)
    ready, running = 0, len(clients)
    while running:
        one = said.get()
        if one.line is None:
            running -= 1
            _check(clients[one.client].wait())
        elif one.line == READY:
            ready += 1
            if ready == len(clients):
                _start(clients)
        else:
            ended[one.client], tokens[one.client] = map(int, one.line.split())
            tell(sum(ended), sum(tokens))


def _start(clients: list[subprocess.Popen[str]]) -> None:
    start = perf_counter() + _MARGIN
    for client in clients:
        assert client.stdin is not None
        client.stdin.write(f"{start!r}\n")
        client.stdin.close()


def _check(status: int) -> None:
    if status:
        raise SpecEngineError(f"a client process of the bench failed, with status {status}")


def _listen(number: int, client: subprocess.Popen[str], said: SimpleQueue[ClientLine]) -> None:
    assert client.stdout is not None
    with client.stdout as lines:
        for line in lines:
            said.put(ClientLine(number, line.strip()))
    said.put(ClientLine(number, None))


@contextmanager
def _clients(folder: Path, count: int) -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    try:
        for number in range(count):
            files = [str(folder / f"{number}.{end}") for end in ("job", "result")]
            command = [sys.executable, "-m", _MODULE, *files]
            pipe = subprocess.PIPE
            started.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
        yield started
    finally:
        for client in started:
            client.kill()
            client.wait()
            assert client.stdin is not None
            client.stdin.close()
