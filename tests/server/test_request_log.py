"""The id of a request, its line in the log, and the keys that let it in."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from specengine.cli.logs import JsonFormatter
from specengine.core.config import ServerConfig
from specengine.core.errors import ConfigError
from specengine.server.app import create_app
from specengine.server.listening import read_keys
from specengine.server.run import background_server
from specengine.server.service import Service
from tests.support.waiting import until

TEXT = "/v1/completions"
Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    """The fields of the lines so far: a line is written after its answer."""
    caplog.set_level(logging.INFO, "specengine.server.request_log")

    def found() -> list[dict[str, Any]]:
        return [one.fields for one in caplog.records if hasattr(one, "fields")]

    return found


def only(lines: Lines) -> dict[str, Any]:
    until(lines)
    (line,) = lines()
    return line


@pytest.mark.parametrize("path", [TEXT, "/health", "/v1/nothing"])
def test_id_of_the_client_comes_back(site: Any, engine: Any, path: str) -> None:
    answer = site.http.get(path, headers={"X-Request-Id": "abc-1"})
    assert answer.headers["x-request-id"] == "abc-1"


@pytest.mark.parametrize("given", [None, "", "a b", "a" * 129, "\x7f"])
def test_other_ids_are_replaced(site: Any, engine: Any, given: str | None) -> None:
    headers = {} if given is None else {"X-Request-Id": given}
    found = [site.http.get("/health", headers=headers).headers["x-request-id"] for _ in range(2)]
    assert all(len(one) == 32 for one in found)
    assert found[0] != found[1] != given


@pytest.mark.parametrize("stream", [False, True])
def test_line_of_an_answer(site: Any, engine: Any, lines: Lines, stream: bool) -> None:
    body = {"model": "fake", "prompt": ["xx", "yyy"], "stream": stream, "max_tokens": 5}
    answer = site.http.post(TEXT, json=body, headers={"X-Request-Id": "mine"})
    assert answer.status_code == 200
    line = only(lines)
    seconds, accepted = line.pop("seconds"), line.pop("accepted_length")
    assert 0 < seconds < 20
    assert accepted > 1
    assert line == {
        "method": "POST",
        "path": TEXT,
        "request_id": "mine",
        "status": 200,
        "prompt_tokens": 5,
        "completion_tokens": 10,
        "first_token_seconds": 0.1,
    }


def test_line_of_a_refusal_says_why(site: Any, engine: Any, lines: Lines) -> None:
    site.post(TEXT, model="fake", prompt="x", stop=["a"] * 17)
    line = only(lines)
    assert line["status"] == 400
    assert line["error_code"] == "limit_exceeded"
    assert "--max-stop-strings" in line["error_message"]


def test_line_of_a_stream_that_fails_says_why(site: Any, engine: Any, lines: Lines) -> None:
    engine.error, engine.error_after = ZeroDivisionError("secret"), 1
    site.post(TEXT, model="fake", prompt="x", stream=True)
    line = only(lines)
    assert line["status"] == 200
    assert line["error_message"] == "internal error; the server's log has the details"
    assert (line["prompt_tokens"], line["completion_tokens"]) == (1, 1)


def test_line_of_a_client_that_left(site: Any, engine: Any, lines: Lines) -> None:
    engine.delay, engine.script = 0.05, "x" * 150
    with site.http.stream(
        "POST", TEXT, json={"model": "fake", "prompt": "x", "stream": True, "max_tokens": 190}
    ) as response:
        next(response.iter_lines())
    line = only(lines)
    assert line["abandoned"] is True
    assert line["prompt_tokens"] == 1
    assert 0 < line["completion_tokens"] < 150  # as far as they came
    assert "accepted_length" not in line  # unknown: rounds are told at the end of a choice


@pytest.mark.parametrize("stream", [False, True])
def test_line_of_a_prompt_that_is_scored_has_its_tokens(
    site: Any, engine: Any, lines: Lines, stream: bool
) -> None:
    more = {"echo": True, "logprobs": 0, "max_tokens": 0, "stream": stream}
    assert site.post(TEXT, model="fake", prompt="xyz", **more).status_code == 200
    line = only(lines)
    assert line["prompt_tokens"] == 3
    assert "completion_tokens" not in line


def test_wrong_keys_are_logged_and_probes_are_not(site: Any, engine: Any, lines: Lines) -> None:
    for path in ("/health", "/ready", "/metrics"):
        site.http.get(path)
    httpx.get(site.url + "/v1/models")
    assert only(lines)["error_code"] == "invalid_api_key"


def record(**more: Any) -> logging.LogRecord:
    made = logging.LogRecord("a.b", logging.INFO, "file", 1, "hello %s", ("é\n",), None)
    made.created = 1.5
    for name, value in more.items():
        setattr(made, name, value)
    return made


def test_json_lines() -> None:
    head = {"time": "1970-01-01T00:00:01.500+00:00", "level": "INFO", "logger": "a.b"}
    text = JsonFormatter().format(record())
    assert "\n" not in text
    assert json.loads(text) == head | {"message": "hello é\n"}
    assert json.loads(JsonFormatter().format(record(fields={"n": 1}))) == head | {"n": 1}
    try:
        raise ValueError("broken")
    except ValueError:
        failed = JsonFormatter().format(record(exc_info=sys.exc_info()))
    assert json.loads(failed)["traceback"].endswith("ValueError: broken")


def test_keys_of_a_file(tmp_path: Path, engine: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nfirst\n\n  second \n")
    config = ServerConfig(port=0, api_key="third", api_key_file=str(file), log_level="warning")
    keys = read_keys(config)
    assert keys == ["third", "first", "second"]
    service = Service()
    service.engine = engine
    with background_server(create_app(service, keys), config) as url:
        for key in (*keys, "# ours", "firs", "firstsecond"):
            headers = {"Authorization": f"Bearer {key}"}
            answer = httpx.get(f"{url}/v1/models", headers=headers)
            assert answer.status_code == (200 if key in keys else 401)
        assert httpx.get(f"{url}/v1/models").status_code == 401


@pytest.mark.parametrize("content", [None, b"", b"# none\n\n", b"\xff"])
def test_files_without_keys_are_refused(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match="--api-key-file"):
        read_keys(ServerConfig(api_key_file=str(file)))
    assert read_keys(ServerConfig()) == []


def test_key_that_no_request_can_carry_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"200000 characters.*give a shorter one"):
        read_keys(ServerConfig(api_key="k" * 200_000))
