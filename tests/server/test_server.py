"""Probes, metrics, tokens, and clients that go away."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from specengine.core.config import ServerConfig
from specengine.core.errors import ConfigError, ModelLoadError
from specengine.server.listening import listen
from specengine.server.run import serve
from tests.support.waiting import until

HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)


def test_models(openai_client: OpenAI, engine: Any) -> None:
    (model,) = openai_client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("fake", "model", "specengine")
    assert openai_client.models.retrieve("fake") == model


def test_not_ready_while_the_model_loads(site: Any, engine: Any) -> None:
    site.service.engine = None
    assert site.http.get("/health").status_code == 200
    assert site.http.get("/ready").status_code == 503
    assert site.http.get("/metrics").status_code == 200
    error = site.refusal("/v1/completions", 503, model="fake", prompt="x")
    assert error["code"] == "loading"
    site.service.engine = engine
    assert site.http.get("/ready").status_code == 200


def test_a_dead_engine_shows(site: Any, engine: Any) -> None:
    engine.is_ready = False
    assert site.http.get("/health").status_code == 503
    assert site.http.get("/ready").status_code == 503


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_probe_by_head_has_the_status_alone(site: Any, engine: Any, path: str) -> None:
    for engine.is_ready, status in ((True, 200), (False, 503)):
        answer = site.http.head(path)
        assert (answer.status_code, answer.content) == (status, b"")
    engine.is_ready = True


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [["one"], ["one", "two"]])
def test_client_gone_aborts(site: Any, engine: Any, stream: bool, prompts: list[str]) -> None:
    """The engine would never end by itself."""
    body = {"model": "fake", "prompt": prompts, "stream": stream, "max_tokens": 190}
    if stream:
        engine.holds_after = 1
        with site.http.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_lines())
    else:
        engine.holds_after = 0
        content = json.dumps(body).encode()
        with socket.create_connection(("127.0.0.1", int(site.url.rpartition(":")[2]))) as client:
            client.sendall(HEAD % len(content) + content)
            until(lambda: len(engine.prompts) == len(prompts))
    until(lambda: len(engine.aborted) == len(prompts))


def test_streams_end_with_done(site: Any, engine: Any) -> None:
    response = site.post("/v1/completions", model="fake", prompt="x", stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"


def test_tokenize_and_detokenize(site: Any, engine: Any) -> None:
    got = site.post("/tokenize", prompt="abé").json()
    assert got["count"] == 4
    assert got["max_model_len"] == 200
    assert site.post("/detokenize", tokens=got["tokens"]).json() == {"prompt": "abé"}
    chat = site.post("/tokenize", messages=[{"role": "user", "content": "x"}]).json()
    text = site.post("/detokenize", tokens=chat["tokens"]).json()["prompt"]
    assert text == "user: x\nassistant:"
    assert site.refusal("/tokenize", 400)["param"] == "prompt"
    assert site.refusal("/detokenize", 400, tokens=[999])["param"] == "tokens"


def test_tokens_of_a_conversation_are_those_of_its_chat(site: Any, engine: Any) -> None:
    """Mistral's templates refuse ids of calls of another length than nine."""
    engine.tokenizer.chat_template = (
        "[TOOL_CALLS]{% for m in messages %}{{ m.tool_call_id }}{% endfor %}"
    )
    call = {
        "id": "call_0123456789",
        "type": "function",
        "function": {"name": "f", "arguments": "{}"},
    }
    turns = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "x"},
    ]
    assert site.post("/v1/chat/completions", model="fake", messages=turns).status_code == 200
    tokens = site.post("/tokenize", messages=turns).json()["tokens"]
    assert engine.tokenizer.decode(tokens) == engine.prompts[-1] == "[TOOL_CALLS]123456789"


def test_the_api_describes_itself(site: Any, engine: Any) -> None:
    schema = site.http.get("/openapi.json").json()
    chat = schema["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"messages", "temperature", "min_p", "stop_token_ids"} <= set(chat)
    assert "functions" not in chat


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/v1/nothing"])
def test_unknown_path_is_told_where_known_ones_are_listed(
    site: Any, engine: Any, path: str
) -> None:
    """Pages that would run scripts of other hosts are not served."""
    error = site.http.get(path).json()["error"]
    assert error["code"] == "not_found"
    assert error["message"] == f"there is no {path} here; GET /openapi.json lists what is"


def metrics(site: Any) -> dict[tuple[str, ...], float]:
    """Values by (name, label values ...)."""
    text = site.http.get("/metrics").text
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_of_the_engine(site: Any, engine: Any) -> None:
    values = metrics(site)
    for name, value in {
        "spec_decode_num_rounds_total": 8,
        "spec_decode_mean_acceptance_length": 1 + 9 / 8,
        "spec_decode_num_drafts_total": 5,
        "spec_decode_num_draft_tokens_total": 20,
        "spec_decode_num_accepted_tokens_total": 9,
        "num_requests_running": 2,
        "num_requests_waiting": 3,
        "kv_usage_ratio": 0.25,
        "prefix_cache_hit_ratio": 0.25,
        "prompt_tokens_total": 40,
        "generation_tokens_total": 7,
        "speculative_num_steps": 2,
        "speculative_num_nodes": 6,
        "speculative_gain": 1.34,
    }.items():
        assert values[(f"specengine:{name}",)] == value
    reason = "batch 64: K=2, 1.34x of none; acceptance 0.71 0.55"
    assert values["specengine:speculative_choice_info", reason] == 1
    per_position = "specengine:spec_decode_num_accepted_tokens_per_pos_total"
    assert [values[(per_position, position)] for position in "01"] == [5, 4]


def test_metrics_of_requests(site: Any, engine: Any) -> None:
    before = metrics(site)
    site.post("/v1/completions", model="fake", prompt="x", max_tokens=50)
    site.post("/v1/completions", model="fake")
    after = metrics(site)

    def gain(*key: str) -> float:
        name = (f"specengine:{key[0]}", *key[1:])
        return after[name] - before.get(name, 0)

    assert gain("http_requests_total", "/v1/completions", "200") == 1
    assert gain("http_requests_total", "/v1/completions", "400") == 1
    assert gain("request_choices_total", "stop") == 1
    assert gain("time_to_first_token_seconds_sum") == pytest.approx(0.1)
    assert gain("e2e_request_latency_seconds_sum") == pytest.approx(0.3)
    assert gain("inter_token_latency_seconds_count") == 1


def test_a_taken_port_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            listen(ServerConfig(port=port))


def test_serve_raises_what_loading_raised() -> None:
    def build() -> Any:
        raise ModelLoadError("no such model")

    caught: list[BaseException] = []

    def run() -> None:
        try:
            serve(ServerConfig(port=0, log_level="warning"), build)
        except ModelLoadError as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert [str(error) for error in caught] == ["no such model"]
