"""A server whose engine sleeps tells clients to come again, and then answers as before."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from specengine import LLM
from specengine.core.config import ServerConfig
from specengine.engine.async_engine import AsyncEngine
from specengine.server.app import create_app
from specengine.server.run import background_server
from specengine.server.service import Service

ADMIN = {"Authorization": "Bearer operator"}
BODY = {"model": "tiny", "prompt": "Hello", "max_tokens": 8, "temperature": 0}
FLAGS = {"device": "cpu", "dtype": "float32", "max_total_tokens": 512}


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    config = ServerConfig(port=0, log_level="warning", admin_api_key="operator")
    service = Service()
    service.engine = AsyncEngine(LLM("tiny", enable_sleep_mode=True, **FLAGS).engine)
    try:
        with (
            background_server(create_app(service, config=config), config) as url,
            httpx.Client(base_url=url, timeout=30) as client,
        ):
            yield client
    finally:
        service.stop()


@pytest.mark.parametrize("level", [1, 2])
def test_requests_in_sleep_get_a_503_and_the_same_answer_afterwards(
    http: httpx.Client, level: int
) -> None:
    before = http.post("/v1/completions", json=BODY).json()["choices"]
    answer = http.post("/sleep", params={"level": level}, headers=ADMIN)
    assert answer.json()["is_sleeping"]
    assert answer.json()["num_bytes"] > 0
    for stream in (False, True):
        refused = http.post("/v1/completions", json={**BODY, "stream": stream})
        assert refused.status_code == 503
        assert refused.headers["Retry-After"]
        assert refused.json()["error"]["code"] == "sleeping"
    assert http.get("/is_sleeping", headers=ADMIN).json() == {"is_sleeping": True}
    assert http.get("/health").status_code == 200
    assert http.get("/server_info", headers=ADMIN).json()["state"]["layer_hooks"] == []
    update = http.post("/update_weights_from_disk", json={"model_path": "tiny"}, headers=ADMIN)
    assert update.status_code == 503
    assert update.json()["error"]["code"] == "sleeping"
    assert http.post("/wake_up", headers=ADMIN).json() == {"is_sleeping": False}
    assert http.post("/v1/completions", json=BODY).json()["choices"] == before
