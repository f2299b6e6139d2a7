"""TLS, OpenTelemetry and embeddings of a server of several processes, in health and in trouble."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.test_embedding_model import engine_of, save
from tests.support.processes import Served, serving
from tests.support.waiting import until

pytestmark = pytest.mark.slow
LONG = {"max_tokens": 3000}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the program openssl, to make a certificate")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=127.0.0.1"]
    more = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*command, *more], check=True, capture_output=True)
    return cert, key


@pytest.fixture(scope="module")
def secure(
    certificate: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    cert, key = certificate
    flags = ("--ssl-certfile", str(cert), "--ssl-keyfile", str(key), "--api-workers", "2")
    trusted = ssl.create_default_context(cafile=str(cert))
    with serving(tmp_path_factory.mktemp("secure"), *flags, verify=trusted) as served:
        yield served


def test_tls_is_spoken_by_front_ends(secure: Served) -> None:
    assert secure.complete().status_code == 200
    with secure.stream(max_tokens=20) as events:
        assert len(list(events)) > 1
    with pytest.raises(httpx.TransportError):
        httpx.get(secure.url.replace("https", "http") + "/health")


def test_handshakes_that_are_never_finished_stop_no_request(secure: Served) -> None:
    port = int(secure.url.rpartition(":")[2])
    with ExitStack() as open_ones:
        for number in range(60):
            one = open_ones.enter_context(socket.create_connection(("127.0.0.1", port)))
            one.sendall((b"", b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/1.1\r\n\r\n")[number % 3])
        for _ in range(5):
            assert secure.complete().status_code == 200
    until(lambda: connections_of(secure) < 10)


def connections_of(served: Served) -> int:
    """Sockets that the front ends hold."""
    links = [link for pid in served.front_ends() for link in Path(f"/proc/{pid}/fd").iterdir()]
    return sum("socket:" in target for target in map(read_link, links)) - BASE * 2


def read_link(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""


BASE = 4  # sockets of a front end that has no connection, about


def test_engine_that_is_killed_tells_clients_through_tls(secure: Served) -> None:
    with secure.stream(**LONG) as events:
        next(events)
        os.kill(secure.engine, signal.SIGKILL)
        *_, last = events
    assert last["error"]["code"] == "stopped"
    until(secure.is_ready)
    assert secure.complete().status_code == 200


@contextmanager
def collecting(answers: bool = True) -> Iterator[tuple[str, list[bytes]]]:
    """An OTLP endpoint, and the bodies that came. answers: otherwise it keeps its callers
    waiting."""
    bodies: list[bytes] = []
    is_over = threading.Event()

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            if not answers:
                is_over.wait(60)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", bodies
    finally:
        is_over.set()
        server.shutdown()
        server.server_close()


def spans(bodies: list[bytes]) -> list[Any]:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    found = []
    for body in bodies:
        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            found += [span for scope in resource.scope_spans for span in scope.spans]
    return found


QUICK = {"OTEL_BSP_SCHEDULE_DELAY": "200", "OTEL_EXPORTER_OTLP_COMPRESSION": "none"}


def test_front_ends_send_spans_and_what_is_left_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    for name, value in (QUICK | {"OTEL_BSP_SCHEDULE_DELAY": "60000"}).items():
        monkeypatch.setenv(name, value)
    with collecting() as (endpoint, bodies):
        with serving(tmp_path, "--api-workers", "2", "--otlp-endpoint", endpoint) as served:
            for _ in range(4):
                assert served.complete().status_code == 200
            assert served.complete(temperature=-1).status_code == 400
        assert len(spans(bodies)) == 5, "sent when the front ends ended"


def test_collector_that_does_not_answer_keeps_no_request_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    for name, value in (QUICK | {"OTEL_EXPORTER_OTLP_TIMEOUT": "2"}).items():
        monkeypatch.setenv(name, value)
    with (
        collecting(answers=False) as (endpoint, bodies),
        serving(tmp_path, "--api-workers", "1", "--otlp-endpoint", endpoint) as served,
    ):
        assert served.complete().status_code == 200
        until(lambda: bodies)
        for _ in range(5):
            assert served.complete().status_code == 200


def test_vectors_come_across_processes(small_models: dict[str, Path], tmp_path: Path) -> None:
    config = {"pooling_mode_lasttoken": True, "include_prompt": True}
    directory = save(tmp_path / "m", small_models["qwen3"], config, ("Transformer", "Pooling"))
    prompts = [[3, 14, 15, 9, 2, 6], [5, 3], [8] * 20]
    with engine_of(directory) as engine:
        expected = [asyncio.run(engine.embed(ids, f"r-{n}")) for n, ids in enumerate(prompts)]
    with serving(tmp_path, "--api-workers", "2", model=str(directory)) as served:
        name = served.get("/v1/models").json()["data"][0]["id"]

        def embed() -> httpx.Response:
            body = {"model": name, "input": prompts}
            return httpx.post(f"{served.url}/v1/embeddings", json=body, timeout=60)

        found = [one["embedding"] for one in embed().json()["data"]]
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, abs=1e-4)
        answer = httpx.post(f"{served.url}/v1/completions", json={"model": name, "prompt": "x"})
        assert answer.status_code == 501
        os.kill(served.engine, signal.SIGKILL)
        until(lambda: embed().status_code == 503)
        # The front end that says so need not be the one that is asked next.
        until(lambda: embed().status_code == 200)
