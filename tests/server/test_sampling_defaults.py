"""Requests that leave out how tokens are chosen, of a model whose files say."""

from __future__ import annotations

from typing import Any

import pytest

from specengine.core.sampling import SamplingParams

DEFAULTS = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}
MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
}


def sampling(site: Any, engine: Any, path: str, **fields: Any) -> SamplingParams:
    """Of a request with these fields."""
    engine.sampling_defaults = DEFAULTS
    answer = site.post(path, model="fake", **BODIES[path], **fields)
    assert answer.status_code == 200, answer.text
    found: SamplingParams = engine.samplings[-1]
    return found


@pytest.mark.parametrize("path", BODIES)
def test_what_a_request_leaves_out_is_the_models(site: Any, engine: Any, path: str) -> None:
    found = sampling(site, engine, path, top_p=0.8)
    assert (found.temperature, found.top_p, found.top_k) == (0.6, 0.8, 20)
    assert (found.repetition_penalty, found.min_p) == (1.05, 0.0)


@pytest.mark.parametrize("path", BODIES)
def test_what_a_request_says_counts(site: Any, engine: Any, path: str) -> None:
    assert sampling(site, engine, path, temperature=1.0).temperature == 1.0
    assert sampling(site, engine, path, temperature=0.0).is_greedy
    assert sampling(site, engine, path, temperature=None).temperature == 0.6


def test_native_requests_say_all_themselves(site: Any, engine: Any) -> None:
    engine.sampling_defaults = DEFAULTS
    assert site.post("/generate", text="hi").status_code == 200
    assert engine.samplings[-1].temperature == 1.0


def test_clients_can_ask_for_them(site: Any, engine: Any) -> None:
    assert site.http.get("/model_info").json()["sampling_defaults"] == {}
    engine.sampling_defaults = DEFAULTS
    assert site.http.get("/model_info").json()["sampling_defaults"] == DEFAULTS
