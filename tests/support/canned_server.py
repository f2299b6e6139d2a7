"""A server that streams what it was told to, byte for byte: no engine stands behind it."""

from __future__ import annotations

import json
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

USAGE = {"prompt_tokens": 5, "completion_tokens": 4}


@dataclass
class Canned:
    """events: of an answer, in order, each `gap` seconds after the one before. piece: bytes written
    at once; None writes whole chunks. meets: so many requests wait for each other before one is
    answered. statuses: of the first requests, whose answers are refusals; those after them are
    answered. metrics: what /metrics says, by call."""

    events: list[dict[str, Any]] = field(default_factory=lambda: [*map(text, "abcd"), usage()])
    gap: float = 0.0
    piece: int | None = None
    meets: int = 0
    ends: str = "\n\n"
    is_done: bool = True
    cuts: bool = False  # the connection, before the answer's end
    closes: bool = False  # Connection: close, and no chunks
    statuses: list[int] = field(default_factory=list)
    metrics: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    num_connections: int = 0
    running: int = 0
    most_running: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


def text(content: str, finish_reason: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": content, "finish_reason": finish_reason, **more}]}


def delta(finish_reason: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish_reason}]}


def usage(**more: Any) -> dict[str, Any]:
    return {"choices": [], "usage": USAGE, **more}


@contextmanager
def canned_server(canned: Canned) -> Iterator[str]:
    """Its URL."""

    class Handler(socketserver.StreamRequestHandler):
        disable_nagle_algorithm = True

        def handle(self) -> None:
            with canned.lock:
                canned.num_connections += 1
            while _serve_one(canned, self.rfile, self.wfile.write):
                pass

    class Server(socketserver.ThreadingTCPServer):
        allow_reuse_address = daemon_threads = True
        block_on_close = False
        request_queue_size = 300

        def handle_error(self, request: Any, client_address: Any) -> None:
            """The client has gone, as some tests want it."""

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def _serve_one(canned: Canned, source: Any, write: Callable[[bytes], object]) -> bool:
    """Whether the connection stays open."""
    head = ""
    while not head.endswith("\r\n\r\n"):
        line = source.readline().decode()
        if not line:
            return False
        head += line
    if head.startswith("GET"):
        return _get(canned, head, write)
    length = next(int(one.split(":")[1]) for one in head.split("\r\n") if "Length" in one)
    body = json.loads(source.read(length))
    with canned.lock:
        canned.times.append(time.perf_counter())
        canned.bodies.append(body)
        canned.heads.append(head)
        canned.running += 1
        canned.most_running = max(canned.most_running, canned.running)
        status = canned.statuses.pop(0) if canned.statuses else 200
    deadline = time.perf_counter() + 60
    while canned.most_running < canned.meets and time.perf_counter() < deadline:
        time.sleep(0.001)
    try:
        return _answer(canned, status, write)
    finally:
        with canned.lock:
            canned.running -= 1


def _get(canned: Canned, head: str, write: Callable[[bytes], object]) -> bool:
    if head.startswith("GET /v1/models"):
        _whole(write, 200, json.dumps({"data": [{"id": "canned"}]}))
    elif head.startswith("GET /metrics") and canned.metrics:
        _whole(write, 200, canned.metrics.pop(0))
    else:
        _whole(write, 404, "")
    return False


def _whole(write: Callable[[bytes], object], status: int, text: str) -> None:
    write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())


def _answer(canned: Canned, status: int, write: Callable[[bytes], object]) -> bool:
    if status != 200:
        _whole(write, status, '{"error": {"message": "no room"}}')
        return True
    kind = "Connection: close" if canned.closes else "Transfer-Encoding: chunked"
    write(f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{kind}\r\n\r\n".encode())
    last = ["[DONE]"] if canned.is_done else []
    for number, payload in enumerate([*map(json.dumps, canned.events), *last]):
        if number:
            time.sleep(canned.gap)
        data = f"data: {payload}{canned.ends}".encode()
        framed = data if canned.closes else b"%x\r\n%b\r\n" % (len(data), data)
        step = canned.piece or len(framed)
        for place in range(0, len(framed), step):
            write(framed[place : place + step])
    if canned.cuts or canned.closes:
        return False
    write(b"0\r\n\r\n")
    return True
