"""Fields and names that clients of OpenAI's and vLLM's servers use."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from openai import OpenAI

from specengine.core.config import ModelConfig
from specengine.core.errors import ConfigError
from specengine.server.admin import SLEEP_PATHS, WAKE_PATHS

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES: Any = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "fake", "messages": MESSAGES},
    TEXT: {"model": "fake", "prompt": "hi"},
}


def chunks(site: Any, path: str, **fields: Any) -> list[dict[str, Any]]:
    text = site.post(path, **BODIES[path], stream=True, **fields).text
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [json.loads(one) for one in events[:-1]]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("metadata", [None, {}, {"a": {"b": [1, None]}}, [1], "x", 5])
def test_metadata_is_any_json(site: Any, engine: Any, path: str, metadata: Any) -> None:
    assert site.post(path, **BODIES[path], metadata=metadata).status_code == 200


@pytest.mark.parametrize("path", BODIES)
def test_what_is_not_served_is_refused_by_name(site: Any, path: str) -> None:
    error = site.refusal(path, 400, **BODIES[path], suffix="x")
    assert error["param"] == "suffix"
    assert "suffix" in error["message"]


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_no_tokens_score_the_prompt_alone(site: Any, engine: Any, stream: bool, echo: bool) -> None:
    fields = {"max_tokens": 0, "echo": echo, "logprobs": 1, "n": 2}
    if stream:
        found = chunks(site, TEXT, **fields, stream_options={"include_usage": True})
        usage = found[-1]["usage"]
        choices = [choice for one in found for choice in one["choices"] if choice["index"] == 1]
        text = "".join(choice["text"] for choice in choices)
        logprobs = [one for c in choices if c["logprobs"] for one in c["logprobs"]["tokens"]]
        finish = choices[-1]["finish_reason"]
    else:
        answer = site.post(TEXT, **BODIES[TEXT], **fields).json()
        usage, choice = answer["usage"], answer["choices"][1]
        text, finish = choice["text"], choice["finish_reason"]
        logprobs = choice["logprobs"]["tokens"]
    assert (text, finish) == ("hi" if echo else "", "length")
    assert logprobs == (["h", "i"] if echo else [])
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2, 0)
    assert engine.samplings[0].max_tokens == 1


@pytest.mark.parametrize("path", BODIES)
def test_negative_max_tokens_are_refused(site: Any, path: str) -> None:
    assert site.refusal(path, 400, **BODIES[path], max_tokens=-1)["param"] == "max_tokens"


@pytest.mark.parametrize("path", BODIES)
def test_usage_in_every_chunk(site: Any, engine: Any, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *found, last = chunks(site, path, stream_options=options, n=2)
    counts = [one["usage"]["completion_tokens"] for one in found]
    assert counts == sorted(counts)
    assert 0 < counts[0] < counts[-1] == last["usage"]["completion_tokens"]
    for one in found:
        assert one["choices"]
        usage = one["usage"]
        assert usage["prompt_tokens"] == last["usage"]["prompt_tokens"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_usage_in_chunks_needs_usage(site: Any) -> None:
    fields = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    error = site.refusal(TEXT, 400, **BODIES[TEXT], **fields)
    assert error["param"] == "stream_options.continuous_usage_stats"


def test_model_of_several_names(site: Any, engine: Any, openai_client: OpenAI) -> None:
    model = replace(engine.config.model, served_model_name="fake, other")
    engine.config = replace(engine.config, model=model)
    assert [one.id for one in openai_client.models.list().data] == ["fake", "other"]
    assert openai_client.models.retrieve("other").id == "other"
    for name in ("fake", "other"):
        answer = openai_client.chat.completions.create(model=name, messages=MESSAGES)
        assert answer.model == "fake"
    error = site.refusal(TEXT, 404, model="fake, other", prompt="x")
    assert error["param"] == "model"
    assert error["message"].endswith("ask for 'fake' or 'other'")


@pytest.mark.parametrize("names", ["", ",", "a,", " ,a"])
def test_empty_names_are_refused(names: str) -> None:
    with pytest.raises(ConfigError, match="--served-model-name"):
        ModelConfig(served_model_name=names)


def test_best_of_keeps_the_likeliest(site: Any, engine: Any) -> None:
    """Choice k has k exclamation marks more, which are likelier than the rest."""
    body = BODIES[TEXT] | {"best_of": 4, "n": 2, "max_tokens": 50}
    answer = site.post(TEXT, **body).json()
    assert [one["index"] for one in answer["choices"]] == [0, 1]
    assert [one["text"][-4:] for one in answer["choices"]] == ["e!!!", "re!!"]
    assert all(one["logprobs"] is None for one in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 4 * 17 + 6
    assert engine.samplings[0].n == 4


def test_best_of_with_several_prompts_and_logprobs(site: Any, engine: Any) -> None:
    fields = {"best_of": 2, "logprobs": 1, "echo": True, "max_tokens": 50}
    answer = site.post(TEXT, model="fake", prompt=["a", "b"], **fields).json()
    assert [one["text"][0] for one in answer["choices"]] == ["a", "b"]
    assert [one["text"][-2:] for one in answer["choices"]] == ["e!", "e!"]
    assert answer["choices"][1]["logprobs"]["tokens"][0] == "b"


@pytest.mark.parametrize("fields", [{"best_of": 1, "n": 2}, {"best_of": 2, "stream": True}])
def test_best_of_that_cannot_be(site: Any, engine: Any, fields: Any) -> None:
    assert site.refusal(TEXT, 400, **BODIES[TEXT], **fields)["param"] == "best_of"


@pytest.mark.parametrize("path", BODIES)
def test_logprobs_of_the_prompt(site: Any, engine: Any, path: str) -> None:
    answer = site.post(path, **BODIES[path], prompt_logprobs=1).json()
    found = (answer if path == CHAT else answer["choices"][0])["prompt_logprobs"]
    assert found[0] is None
    (entry,) = found[-1].items()
    token = int(entry[0])
    assert entry[1] == {
        "logprob": -token / 100,
        "rank": 1,
        "decoded_token": engine.tokenizer.decode([token]),
    }
    assert len(found) == len(engine.prompts[0])
    assert answer["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("path", BODIES)
def test_logprobs_of_the_prompt_have_no_stream(site: Any, engine: Any, path: str) -> None:
    error = site.refusal(path, 400, **BODIES[path], prompt_logprobs=1, stream=True)
    assert error["param"] == "prompt_logprobs"


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_token_ids(site: Any, engine: Any, path: str, stream: bool) -> None:
    fields: dict[str, Any] = {"return_token_ids": True, "max_tokens": 50}
    if stream:
        found = chunks(site, path, **fields)
        made = [token for one in found for token in one["choices"][0].get("token_ids", [])]
        prompts = [one.get("prompt_token_ids") for one in found]
        prompts += [one["choices"][0].get("prompt_token_ids") for one in found]
        (prompt,) = [one for one in prompts if one is not None]
    else:
        answer = site.post(path, **BODIES[path], **fields).json()
        made = answer["choices"][0]["token_ids"]
        prompt = (answer if path == CHAT else answer["choices"][0])["prompt_token_ids"]
    assert engine.tokenizer.decode(prompt) == engine.prompts[0]
    assert made[:2] == [39, 72]
    assert made[-1] == 256
    assert len(made) == 17


def test_priority_goes_to_the_engine(site: Any, engine: Any) -> None:
    for path, body in BODIES.items():
        assert site.post(path, **body, priority=-3).status_code == 200
    assert [one.priority for one in engine.samplings] == [-3, -3]


def test_every_path_describes_itself(site: Any, engine: Any) -> None:
    schema = site.http.get("/openapi.json").json()
    posted = {path: one["post"] for path, one in schema["paths"].items() if "post" in one}
    assert {CHAT, TEXT, "/v1/responses", "/v1/embeddings", "/generate"} <= set(posted)
    for path, one in posted.items():
        if path == "/flush_cache" or path in (*SLEEP_PATHS, *WAKE_PATHS):
            assert "requestBody" not in one
            continue
        content = one["requestBody"]["content"]["application/json"]["schema"]
        name = content["$ref"].rpartition("/")[2]
        assert schema["components"]["schemas"][name]["properties"], path
