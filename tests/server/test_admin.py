"""What an operator asks of a server, and who may."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from specengine.core.config import EngineConfig, ServerConfig
from specengine.core.errors import ConfigError, EngineAsleepError
from specengine.core.options import HIDDEN
from specengine.engine.outgoing import is_named, owner_of, request_id
from specengine.server.app import create_app
from specengine.server.errors import as_api_error
from specengine.server.run import background_server
from specengine.server.service import Service
from tests.server.conftest import FakeEngine, refusal

ADMIN = "admin-secret"
PATHS = [
    ("GET", "/server_info"),
    ("POST", "/flush_cache"),
    ("POST", "/abort_request"),
    ("POST", "/update_weights_from_disk"),
    ("POST", "/sleep"),
    ("POST", "/wake_up"),
    ("GET", "/is_sleeping"),
    ("POST", "/release_memory_occupation"),
    ("POST", "/resume_memory_occupation"),
]
CONFIG = ServerConfig(port=0, log_level="warning", admin_api_key=ADMIN, api_key="user-secret")


@pytest.fixture(scope="module")
def guarded() -> Iterator[tuple[httpx.Client, FakeEngine]]:
    """A server with a key for requests, and another for its operator."""
    service = Service()
    engine = FakeEngine(config=replace(EngineConfig(), server=CONFIG))
    service.engine = engine
    with (
        background_server(create_app(service, ["user-secret"], CONFIG), CONFIG) as url,
        httpx.Client(base_url=url, timeout=20) as http,
    ):
        yield http, engine


def key(value: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {value}"}


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_admin_paths_are_closed_without_an_admin_key(site: Any, method: str, path: str) -> None:
    error = refusal(site.http.request(method, path), 403)
    assert "--admin-api-key" in error["message"]


@pytest.mark.parametrize("given", [{}, key("user-secret"), key(ADMIN + "x")])
@pytest.mark.parametrize(("method", "path"), PATHS)
def test_admin_paths_want_the_admin_key(
    guarded: Any, method: str, path: str, given: dict[str, str]
) -> None:
    assert refusal(guarded[0].request(method, path, headers=given), 401)["code"] == (
        "invalid_api_key"
    )


def test_the_admin_key_opens_no_other_path(guarded: Any) -> None:
    http, _ = guarded
    assert http.get("/v1/models", headers=key(ADMIN)).status_code == 401
    assert http.get("/v1/models", headers=key("user-secret")).status_code == 200


def test_server_info_hides_keys(guarded: Any) -> None:
    info = guarded[0].get("/server_info", headers=key(ADMIN)).json()
    assert info["model_name"] == "fake"
    assert info["config"]["server"]["admin_api_key"] == HIDDEN
    assert info["config"]["server"]["api_key"] == HIDDEN
    assert info["state"]["num_running"] == 2
    assert info["state"]["spec"]["num_draft_tokens"] == 20
    assert info["internal_states"] == [{"avg_spec_accept_length": 1 + 9 / 8}]


def test_server_info_asks_the_engine_for_its_counters(guarded: Any) -> None:
    http, engine = guarded
    before = engine.refreshes
    assert http.get("/server_info", headers=key(ADMIN)).status_code == 200
    assert engine.refreshes == before + 1


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_flush_cache(guarded: Any, method: str) -> None:
    answer = guarded[0].request(method, "/flush_cache", headers=key(ADMIN))
    assert answer.json() == {"num_tokens": 17}


def test_abort_request(guarded: Any) -> None:
    http, engine = guarded

    def abort(**body: Any) -> httpx.Response:
        return http.post("/abort_request", headers=key(ADMIN), json=body)

    assert abort(abort_all=True).json() == {"num_requests": 3}
    assert engine.given_up[-1] is None
    abort(rid="chatcmpl-12")
    assert "12" in engine.given_up[-1]
    for body in ({}, {"rid": "x", "abort_all": True}, {"abort_all": False}):
        assert refusal(abort(**body), 400)["param"] == "rid"


def test_requests_are_known_by_their_header_and_by_the_id_of_their_answer(guarded: Any) -> None:
    http, engine = guarded
    headers = key("user-secret") | {"X-Request-Id": "a:b-3"}
    body = {"model": "fake", "prompt": ["x", "y"]}
    answer = http.post("/v1/completions", headers=headers, json=body).json()
    for rid in engine.rids[-2:]:
        for name in ("a:b-3", answer["id"].removeprefix("cmpl-"), rid):
            assert is_named(rid, [name])
        assert not is_named(rid, ["a", "b", "a:b", ""])
    assert engine.rids[-2] != engine.rids[-1]


def test_prompt_of_a_list_is_known_by_its_number_as_well(guarded: Any) -> None:
    http, engine = guarded
    body = {"text": ["x", "y"], "rid": "mine"}
    answers = http.post("/generate", headers=key("user-secret"), json=body).json()
    names = [one["meta_info"]["id"] for one in answers]
    assert names == ["mine_0", "mine_1"]
    rids = sorted(engine.rids[-2:])
    assert [[is_named(rid, [name]) for name in names] for rid in rids] == [
        [True, False],
        [False, True],
    ]
    assert all(is_named(rid, ["mine"]) for rid in rids)


@pytest.mark.parametrize("value", ["", HIDDEN])
def test_admin_keys_that_anybody_could_guess_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="--admin-api-key"):
        ServerConfig(admin_api_key=value)


def test_update_weights_from_disk(guarded: Any) -> None:
    http, engine = guarded
    body = {"model_path": "there", "draft_model_path": "beside"}
    answer = http.post("/update_weights_from_disk", headers=key(ADMIN), json=body)
    assert answer.json() == {"success": True, "num_forgotten_tokens": 5}
    assert engine.updates == [("there", "beside")]


@pytest.mark.parametrize("body", [{}, {"model_path": "nowhere"}, {"path": "there"}])
def test_weights_that_do_not_fit_are_refused(guarded: Any, body: dict[str, str]) -> None:
    answer = guarded[0].post("/update_weights_from_disk", headers=key(ADMIN), json=body)
    assert answer.status_code == 400


@pytest.mark.parametrize(
    ("sleep", "wake"),
    [("/sleep", "/wake_up"), ("/release_memory_occupation", "/resume_memory_occupation")],
)
def test_sleep_and_wake(guarded: Any, sleep: str, wake: str) -> None:
    http, engine = guarded
    answer = http.post(sleep, params={"level": 2}, headers=key(ADMIN))
    assert (answer.json(), engine.level) == ({"is_sleeping": True, "num_bytes": 99}, 2)
    assert http.get("/is_sleeping", headers=key(ADMIN)).json() == {"is_sleeping": True}
    for path in (sleep, wake):
        for given in ({"params": {"tags": "weights"}}, {"json": {"tags": ["weights"]}}):
            assert http.post(path, headers=key(ADMIN), **given).status_code == 400
    assert http.post(wake, headers=key(ADMIN)).json() == {"is_sleeping": False}
    assert http.get("/is_sleeping", headers=key(ADMIN)).json() == {"is_sleeping": False}
    assert http.post(sleep, headers=key(ADMIN)).status_code == 200
    assert engine.level == 1
    assert http.post(sleep, params={"level": 3}, headers=key(ADMIN)).status_code == 400
    http.post(wake, headers=key(ADMIN))


def test_requests_of_a_sleeping_engine_are_to_come_again() -> None:
    error = as_api_error(EngineAsleepError("the engine sleeps"))
    assert (error.status, error.code) == (503, "sleeping")
    assert "Retry-After" in error.headers()


def test_prompts_of_one_call_have_one_owner() -> None:
    for label in ("a", "a:b-c", "", "-"):
        assert {owner_of(request_id(label, "job", prompt)) for prompt in (0, 7)} == {"job"}
    assert owner_of("17") == owner_of("data-3") == ""
