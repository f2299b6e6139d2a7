"""Who may reach the server, and how: other origins, TLS, a key for the metrics."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from specengine.core.config import ServerConfig
from specengine.core.errors import ConfigError
from specengine.server.app import create_app
from specengine.server.listening import check_tls
from specengine.server.run import background_server
from specengine.server.service import Service
from tests.server.conftest import KEY, FakeEngine

ORIGIN = "https://chat.example.org"
BEARER = {"Authorization": f"Bearer {KEY}"}


@contextmanager
def serving(**options: Any) -> Iterator[str]:
    config = ServerConfig(port=0, log_level="warning", **options)
    service = Service()
    service.engine = FakeEngine()
    with background_server(create_app(service, [KEY], config), config) as url:
        yield url


def preflight(url: str, origin: str) -> httpx.Response:
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    return httpx.request("OPTIONS", url + "/v1/chat/completions", headers=headers)


def allowed(response: httpx.Response) -> str | None:
    return response.headers.get("access-control-allow-origin")


@pytest.mark.parametrize(
    ("given", "status"),
    [
        (f"bearer {KEY}", 200),
        (f"BEARER  {KEY}", 200),
        (KEY, 401),
        (f"Bearer{KEY}", 401),
        (f"Bearer {KEY.upper()}", 401),
        (f"Bearer {KEY} {KEY}", 401),
        ("Bearer", 401),
    ],
)
def test_name_of_the_scheme_may_have_any_case_and_the_key_not(given: str, status: int) -> None:
    with serving() as url:
        answer = httpx.get(url + "/v1/models", headers={"Authorization": given})
        assert answer.status_code == status


def test_other_origins_are_not_allowed_by_default() -> None:
    with serving() as url:
        assert preflight(url, ORIGIN).status_code == 401
        answer = httpx.get(url + "/v1/models", headers={**BEARER, "Origin": ORIGIN})
        assert (answer.status_code, allowed(answer)) == (200, None)


def test_named_origins_are_allowed_and_others_are_not() -> None:
    with serving(cors_origins=f"{ORIGIN}, http://localhost:3000") as url:
        asked = preflight(url, ORIGIN)
        assert (asked.status_code, allowed(asked)) == (200, ORIGIN)
        assert "authorization" in asked.headers["access-control-allow-headers"]
        assert allowed(preflight(url, "https://evil.example.org")) is None
        answer = httpx.get(url + "/v1/models", headers={**BEARER, "Origin": ORIGIN})
        assert (answer.status_code, allowed(answer)) == (200, ORIGIN)
        assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()
        assert "access-control-allow-credentials" not in answer.headers
        refused = httpx.get(url + "/v1/models", headers={"Origin": ORIGIN})
        assert (refused.status_code, allowed(refused)) == (401, ORIGIN)  # the page may read why


@pytest.mark.parametrize("origins", ["example.org", "https://a.org/path", "https://a.org,", ""])
def test_origins_in_other_forms_are_refused(origins: str) -> None:
    with pytest.raises(ConfigError, match="--cors-origins"):
        ServerConfig(cors_origins=origins)


@pytest.mark.parametrize("needs_key", [False, True])
def test_metrics_need_a_key_where_told(needs_key: bool) -> None:
    with serving(metrics_require_key=needs_key) as url:
        assert httpx.get(url + "/metrics").status_code == (401 if needs_key else 200)
        assert httpx.get(url + "/metrics", headers=BEARER).status_code == 200
        assert httpx.get(url + "/health").status_code == 200


def test_metrics_have_the_names_of_vllm_where_told() -> None:
    for compat in (None, "vllm"):
        with serving(metrics_compat=compat) as url:
            text = httpx.get(url + "/metrics").text
            assert ("vllm:num_requests_running" in text) == (compat == "vllm")
            assert "specengine:num_requests_running" in text


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


def test_tls_serves_answers_and_streams(certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    with serving(ssl_certfile=str(cert), ssl_keyfile=str(key)) as url:
        assert url.startswith("https://")
        with httpx.Client(
            base_url=url, verify=ssl.create_default_context(cafile=str(cert)), headers=BEARER
        ) as http:
            assert http.get("/v1/models").status_code == 200
            body = {"model": "fake", "prompt": "x", "stream": True}
            assert http.post("/v1/completions", json=body).text.endswith("data: [DONE]\n\n")
        with pytest.raises(httpx.ConnectError):
            httpx.get(url + "/health")  # the certificate is its own authority
        with pytest.raises(httpx.TransportError):
            httpx.get(url.replace("https", "http") + "/health")


def test_tls_files_that_do_not_fit_are_refused(
    certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    cert, key = certificate
    locked = tmp_path / "locked.pem"
    given = ["-passout", "pass:secret", "-in", str(key), "-out", str(locked)]
    subprocess.run(["openssl", "rsa", "-aes256", *given], check=True, capture_output=True)
    check_tls(ServerConfig(ssl_certfile=str(cert), ssl_keyfile=str(key)))
    for wrong in (tmp_path / "missing.pem", cert, locked):
        with pytest.raises(ConfigError, match="--ssl-certfile"):
            check_tls(ServerConfig(ssl_certfile=str(cert), ssl_keyfile=str(wrong)))
    with pytest.raises(ConfigError, match="--ssl-certfile"):
        ServerConfig(ssl_keyfile=str(key))
    check_tls(ServerConfig())
