"""Bad input: refused by name, in OpenAI's shape, and the server lives on."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from specengine.core.errors import QueueFullError, RequestError
from specengine.server.native.fields import NativeRequest
from specengine.server.native.sampling import NativeSampling
from specengine.server.protocol import ChatRequest, CompletionRequest
from specengine.server.responses.fields import ResponsesRequest
from specengine.server.structured import FORMS

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(autouse=True)
def lives_on(site: Any, engine: Any) -> Any:
    yield
    engine.error = None
    assert site.post(TEXT, model="fake", prompt="x").status_code == 200


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", -1, "temperature must be in"),
        ("temperature", "0.5", "valid number"),
        ("temperature", True, "valid number"),
        ("top_p", 0, "top_p must be in"),
        ("n", 0, "greater than or equal to 1"),
        ("n", 129, "at most 128 are taken here (--max-choices)"),
        ("max_tokens", 0, "max_tokens must be a whole number"),
        ("max_completion_tokens", 0, "greater than or equal to 1"),
        ("top_logprobs", 21, "less than or equal to 20"),
        ("seed", 2**70, "seed must be a whole number"),
        ("stop", [""], "non-empty"),
        ("logit_bias", {"a": 1}, "token ids"),
        ("logit_bias", {"1": 101}, "logit_bias must be in"),
        ("stop_token_ids", [-1], "token ids"),
        ("frequency_penalty", 3, "frequency_penalty must be in"),
        ("min_tokens", -1, "min_tokens must be"),
        ("stream_options", {"include_usage": True}, "needs stream"),
        ("messages", [], "at least 1"),
        ("functions", [{"name": "f"}], "not supported"),
        ("tool_choice", "required", "needs tools"),
        ("audio", {"voice": "x"}, "not supported"),
        ("store", True, "not supported"),
        ("reasoning_effort", "low", "has no reasoning effort"),
        ("best_of", 2, "not a parameter"),
        ("temprature", 1, "not a parameter"),
    ],
)
def test_chat_refuses_by_name(site: Any, field: str, value: Any, message: str) -> None:
    body = {"model": "fake", "messages": MESSAGES, field: value}
    if field == "top_logprobs":
        body["logprobs"] = True
    error = site.refusal(CHAT, 400, **body)
    assert error["param"] == field
    assert error["type"] == "invalid_request_error"
    assert message in error["message"]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
        ({"role": "robot", "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": "x", "tool_call_id": "1"}, "messages[0].tool_call_id"),
        (
            {"role": "user", "content": "x", "reasoning_content": "y"},
            "messages[0].reasoning_content",
        ),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "assistant", "content": None}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content"),
        ({"role": "user", "content": "x", "mood": 1}, "messages[0].mood"),
        (
            {"role": "assistant", "content": "x", "tool_calls": [1]},
            "messages[0].tool_calls[0]",
        ),
    ],
)
def test_messages_are_refused_by_name(site: Any, message: Any, param: str) -> None:
    assert site.refusal(CHAT, 400, model="fake", messages=[message])["param"] == param


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", ""),
        ("prompt", []),
        ("prompt", None),
        ("prompt", [1, "a"]),
        ("prompt", [[]]),
        ("prompt", [True]),
        ("suffix", "x"),
        ("best_of", 0),
        ("prompt_logprobs", 21),
        ("priority", 2**40),
        ("logprobs", 21),
        ("logprobs", True),
        ("tools", []),
    ],
)
def test_completions_refuse_by_name(site: Any, field: str, value: Any) -> None:
    body = {"model": "fake", "prompt": "x", field: value}
    assert site.refusal(TEXT, 400, **body)["param"] == field


def test_missing_fields(site: Any) -> None:
    assert site.refusal(CHAT, 400, messages=MESSAGES)["param"] == "model"
    assert site.refusal(CHAT, 400, model="fake")["param"] == "messages"
    assert site.refusal(CHAT, 400, model="fake", messages=MESSAGES, top_logprobs=1)["param"] == (
        "top_logprobs"
    )


@pytest.mark.parametrize("content", [b'{"model": ', b"", b"\xff", b"[1]", b"null"])
def test_bodies_that_are_no_json_object(site: Any, content: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    response = site.http.post(CHAT, content=content, headers=headers)
    assert response.status_code == 400
    assert "JSON" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "content", "param"),
    [
        (TEXT, rb'{"model": "fake", "prompt": "\ud800"}', "prompt"),
        (
            CHAT,
            rb'{"model": "fake", "messages": [{"role": "user", "content": "\ud800"}]}',
            "messages",
        ),
        ("/generate", rb'{"text": ["x", "\ud800"]}', "text"),
        ("/generate", rb'{"text": ["x", "y"], "rid": ["a", "\ud800"]}', "rid"),
        (TEXT, b'{"model": "fake", "prompt": "x", "temperature": NaN}', "temperature"),
        (TEXT, b'{"model": "fake", "prompt": "x", "seed": 1e999}', "seed"),
        (TEXT, b"[" * 100_000, None),
    ],
)
def test_json_that_only_just_is(site: Any, path: str, content: bytes, param: str | None) -> None:
    headers = {"Content-Type": "application/json"}
    response = site.http.post(path, content=content, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_unknown_model(openai_client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'gpt' is not served") as caught:
        openai_client.chat.completions.create(model="gpt", messages=MESSAGES)
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.NotFoundError):
        openai_client.models.retrieve("gpt")


def test_wrong_key(site: Any) -> None:
    with (
        OpenAI(base_url=site.url + "/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()
    response = httpx.get(site.url + "/v1/models")
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert httpx.get(site.url + "/health").status_code == 200


def test_unknown_route_and_method(site: Any) -> None:
    missing = site.http.get("/v1/nothing")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    wrong = site.http.get(CHAT)
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_too_long(site: Any, stream: bool) -> None:
    error = site.refusal(TEXT, 400, model="fake", prompt="x" * 200, stream=stream)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    long = [{"role": "user", "content": "x" * 200}]
    assert site.refusal(CHAT, 400, model="fake", messages=long)["param"] == "messages"


def test_huge_max_tokens_are_cut(site: Any, engine: Any) -> None:
    response = site.post(TEXT, model="fake", prompt="x", max_tokens=10**30)
    assert response.status_code == 200
    assert engine.samplings[0].max_tokens == 10**30  # the engine cuts it to what fits


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (RequestError("no such token", "logit_bias"), 400, "no such token"),
        (QueueFullError("4096 requests wait"), 503, "4096 requests wait"),
        (ZeroDivisionError("secret detail"), 500, "internal error"),
    ],
)
def test_errors_of_the_engine(
    site: Any,
    engine: Any,
    error: Exception,
    status: int,
    message: str,
    stream: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine.error = error
    got = site.refusal(TEXT, status, model="fake", prompt="x", stream=stream)
    assert message in got["message"]
    assert "secret" not in got["message"]
    assert ("secret" in caplog.text) == (status == 500)


def test_an_error_within_a_stream(lenient_client: OpenAI, engine: Any) -> None:
    engine.error, engine.error_after = RequestError("gone wrong"), 2
    stream = lenient_client.completions.create(model="fake", prompt="x", stream=True)
    seen = []
    with pytest.raises(openai.APIError, match="gone wrong"):
        seen += [chunk.choices[0].text for chunk in stream]
    assert engine.aborted


@pytest.mark.parametrize(("kind", "status"), [("error", 400), ("abort", 503)])
def test_a_request_that_the_engine_gives_up(site: Any, engine: Any, kind: str, status: int) -> None:
    engine.final_kind = kind
    error = site.refusal(TEXT, status, model="fake", prompt="x", max_tokens=99)
    assert error["message"] == "gave up"
    engine.final_kind = "stop"


@pytest.mark.parametrize(
    ("path", "name", "words"),
    [
        (TEXT, "guided_json", "use structured_outputs.json"),
        (CHAT, "guided_choice", "use structured_outputs.choice"),
        (CHAT, "regex", "use structured_outputs.regex"),
        (TEXT, "max_new_tokens", "use max_tokens"),
        (CHAT, "extra_body", "use its fields, beside the others"),
        ("/v1/responses", "max_tokens", "use max_output_tokens"),
        ("/generate", "temperature", "use sampling_params.temperature"),
        ("/generate", "max_tokens", "use sampling_params.max_new_tokens"),
        ("/generate", "prompt", "use text or input_ids"),
    ],
)
def test_what_other_servers_call_otherwise_is_refused_with_the_name_here(
    site: Any, engine: Any, path: str, name: str, words: str
) -> None:
    base = {TEXT: {"prompt": "x"}, CHAT: {"messages": MESSAGES}, "/v1/responses": {"input": "x"}}
    error = site.refusal(path, 400, model="fake", **base.get(path, {"text": "x"}), **{name: 5})
    assert (error["param"], error["code"]) == (name, "unknown_param")
    assert error["message"] == f"{name} is not a parameter of this endpoint; {words}"


def test_renamed_sampling_parameters_are_named_where_they_stand(site: Any, engine: Any) -> None:
    error = site.refusal("/generate", 400, text="x", sampling_params={"max_tokens": 3})
    assert error["param"] == "sampling_params.max_tokens"
    assert error["message"].endswith("use max_new_tokens")


@pytest.mark.parametrize(
    "model", [ChatRequest, CompletionRequest, ResponsesRequest, NativeRequest, NativeSampling]
)
def test_what_is_named_instead_exists(model: Any) -> None:
    fields = {*model.model_fields, "its", "/v1/chat/completions"}
    for name, told in model.instead.items():
        if name not in model.model_fields:
            for one in told.partition(",")[0].replace(" or ", " and ").split(" and "):
                first, _, rest = one.partition(" ")[0].partition(".")
                assert first in fields, (name, told)
                if first == "sampling_params":
                    assert rest in NativeSampling.model_fields
                elif first == "structured_outputs":
                    assert rest in FORMS
