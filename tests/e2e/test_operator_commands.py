"""An operator's commands reach the engine: requests end, cached prefixes go."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from specengine import SpecConfig
from specengine.core.config import ServerConfig
from specengine.engine.outgoing import Choice
from tests.e2e.test_server_engine import FLAGS, PROMPT, SPEC
from tests.support.live_server import LiveServer, live_server
from tests.support.waiting import until

SERVER = ServerConfig(port=0, admin_api_key="k")
KEY = {"Authorization": "Bearer k"}
LONG: dict[str, Any] = {"max_new_tokens": 2000, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module", params=[None, SPEC], ids=["plain", "NGRAM"])
def live(request: pytest.FixtureRequest, small_models: dict[str, Path]) -> Iterator[LiveServer]:
    spec: SpecConfig | None = request.param
    flags = {"model": str(small_models["llama"]), **FLAGS, "max_total_tokens": 8192}
    with live_server(flags, spec, SERVER) as live:
        yield live


def admin(live: LiveServer, path: str, **body: Any) -> Any:
    answer = httpx.post(live.url + path, headers=KEY, json=body or None, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()


def follow(live: LiveServer, begun: threading.Event, **body: Any) -> dict[str, Any]:
    """The last event of a /generate that streams."""
    last: dict[str, Any] = {}
    body = {"text": PROMPT, "sampling_params": LONG, "stream": True, **body}
    with httpx.stream("POST", live.url + "/generate", json=body, timeout=60) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                last = json.loads(line.removeprefix("data: "))
                begun.set()
    return last


@contextmanager
def slow_engine(live: LiveServer) -> Iterator[None]:
    """Each step takes long: no request ends before an operator ends it."""
    advance = live.engine.advance

    def slowly() -> list[Choice]:
        time.sleep(0.2)
        return advance()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live.engine, "advance", slowly)
        yield


def test_a_request_is_ended_by_its_name(live: LiveServer) -> None:
    """The small model's context is 512 tokens: the request ends early, or not at all."""
    begun, other = threading.Event(), threading.Event()
    with ThreadPoolExecutor() as pool:
        slow = {"sampling_params": LONG | {"max_new_tokens": 120}}
        with slow_engine(live):
            first = pool.submit(follow, live, begun, rid="mine", **slow)
            second = pool.submit(follow, live, other, rid="mine-too", **slow)
            assert begun.wait(60)
            assert other.wait(60)
            assert admin(live, "/abort_request", rid="mine") == {"num_requests": 1}
        ended, whole = first.result(60), second.result(60)
    assert ended["meta_info"]["finish_reason"]["type"] == "abort"
    assert "operator" in ended["meta_info"]["finish_reason"]["message"]
    made = ended["meta_info"]["completion_tokens"]
    assert 0 < made < 120
    assert whole["meta_info"]["completion_tokens"] == 120
    assert whole["output_ids"][:made] == ended["output_ids"]
    live.engine.scheduler.check_invariant()


def test_one_prompt_of_a_list_is_ended_by_its_number(live: LiveServer) -> None:
    params = {"max_new_tokens": 120, "ignore_eos": True, "temperature": 0}
    body = {"text": ["abc", "bcd", "cde"], "rid": "mine", "sampling_params": [params] * 3}
    with ThreadPoolExecutor() as pool:
        with slow_engine(live):
            asked = pool.submit(httpx.post, f"{live.url}/generate", json=body, timeout=60)
            until(lambda: live.engine.scheduler.num_running == 3)
            assert admin(live, "/abort_request", rid="mine_1") == {"num_requests": 1}
        found = [one["meta_info"] for one in asked.result(60).json()]
    assert [one["id"] for one in found] == ["mine_0", "mine_1", "mine_2"]
    assert [one["finish_reason"]["type"] for one in found] == ["length", "abort", "length"]
    live.engine.scheduler.check_invariant()


def test_all_requests_are_ended_and_told_so(live: LiveServer) -> None:
    body = {"model": "small", "prompt": PROMPT, "max_tokens": 480, "ignore_eos": True}
    with ThreadPoolExecutor() as pool, slow_engine(live):
        asked = [
            pool.submit(httpx.post, f"{live.url}/v1/completions", json=body, timeout=60)
            for _ in range(3)
        ]
        until(lambda: live.engine.scheduler.num_running == 3)
        assert admin(live, "/abort_request", abort_all=True) == {"num_requests": 3}
        for one in asked:
            answer = one.result(60)
            assert answer.status_code == 503
            assert "operator" in answer.json()["error"]["message"]
    assert not live.engine.has_work
    stats = live.engine.stats()
    assert stats.num_free_slots == stats.num_slots
    assert admin(live, "/abort_request", rid="nobody") == {"num_requests": 0}


def test_flushed_prefixes_are_not_found_again(live: LiveServer) -> None:
    def cached() -> int:
        body = {"text": "0123456789" * 5, "sampling_params": {"max_new_tokens": 2}}
        answer = httpx.post(live.url + "/generate", json=body, timeout=30).json()
        return int(answer["meta_info"]["cached_tokens"])

    cached()
    assert cached() > 0
    assert admin(live, "/flush_cache")["num_tokens"] >= 48
    assert admin(live, "/flush_cache") == {"num_tokens": 0}
    assert cached() == 0
    live.engine.scheduler.check_invariant()


def test_callers_are_forgotten_when_their_requests_have_ended(live: LiveServer) -> None:
    body = {"text": "abc", "sampling_params": {"max_new_tokens": 3, "n": 2}}
    assert httpx.post(live.url + "/generate", json=body, timeout=30).status_code == 200
    assert live.asynchronous._host._open == {}
    assert live.asynchronous._streams == {}


def test_server_info_tells_what_runs(live: LiveServer) -> None:
    info = httpx.get(live.url + "/server_info", headers=KEY, timeout=30).json()
    assert info["state"]["num_slots"] == 8192
    assert info["config"]["memory"]["page_size"] == 16
    assert info["context_length"] == 512
