"""Limits of a request: taken at the edge, refused behind it, before any work is done."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from specengine.core.errors import ConfigError
from specengine.core.limits import LimitConfig
from specengine.server.body import BodyReader
from specengine.server.bounds import BOUNDS
from specengine.server.errors import ApiError
from tests.support.waiting import until

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSES, NATIVE, EMBEDDINGS = "/v1/responses", "/generate", "/v1/embeddings"
LIMITS = LimitConfig()
Json = dict[str, Any]


def chat(**fields: Any) -> Json:
    return {"model": "fake", "messages": [{"role": "user", "content": "x"}], **fields}


def text(**fields: Any) -> Json:
    return {"model": "fake", "prompt": "x", "max_tokens": 1, **fields}


def padded(size: int, around: Callable[[str], Any]) -> Any:
    """`around` a text, so long that the JSON without spaces has `size` bytes."""
    empty = len(json.dumps(around(""), separators=(",", ":")))
    return around("a" * (size - empty))


def schema(comment: str) -> Json:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$comment": comment}}}


def text_format(comment: str) -> Json:
    return {"format": {"type": "json_schema", "name": "x", "schema": {"$comment": comment}}}


SIZED: dict[tuple[str, str], tuple[str, Callable[[int], Json]]] = {
    ("max_messages", "messages"): (
        CHAT,
        lambda size: chat(messages=[{"role": "user", "content": ""}] * size),
    ),
    ("max_messages", "input"): (
        RESPONSES,
        lambda size: {"model": "fake", "input": [{"role": "user", "content": ""}] * size},
    ),
    ("max_grammar_bytes", "text"): (
        RESPONSES,
        lambda size: {"model": "fake", "input": "x", "text": padded(size, text_format)},
    ),
    ("max_prompts", "prompt"): (TEXT, lambda size: text(prompt=["x"] * size)),
    ("max_prompts", "text"): (NATIVE, lambda size: {"text": ["x"] * size}),
    ("max_prompts", "input_ids"): (NATIVE, lambda size: {"input_ids": [[5]] * size}),
    ("max_prompts", "input"): (EMBEDDINGS, lambda size: {"model": "fake", "input": ["x"] * size}),
    ("max_prompts", "sampling_params"): (
        NATIVE,
        lambda size: {"text": ["x"] * LIMITS.max_prompts, "sampling_params": [{}] * size},
    ),
    ("max_choices", "n"): (TEXT, lambda size: text(prompt=["x"], n=size)),
    ("max_choices", "best_of"): (TEXT, lambda size: text(prompt=["x"], best_of=size)),
    ("max_stop_strings", "stop"): (TEXT, lambda size: text(stop=["zz"] * size)),
    ("max_stop_bytes", "stop"): (
        CHAT,
        lambda size: chat(stop="é" * (size // 2) + "z" * (size % 2)),
    ),
    ("max_stop_token_ids", "stop_token_ids"): (TEXT, lambda size: text(stop_token_ids=[7] * size)),
    ("max_logit_bias", "logit_bias"): (
        TEXT,
        lambda size: text(logit_bias={str(token): 1 for token in range(size)}),
    ),
    ("max_grammar_bytes", "response_format"): (
        CHAT,
        lambda size: chat(response_format=padded(size, schema)),
    ),
    ("max_grammar_bytes", "structured_outputs"): (
        TEXT,
        lambda size: text(structured_outputs=padded(size, lambda regex: {"regex": regex})),
    ),
    ("max_metadata_bytes", "metadata"): (
        CHAT,
        lambda size: chat(metadata=padded(size, lambda value: {"a": value})),
    ),
    ("max_tools_bytes", "tools"): (CHAT, lambda size: chat(tools=padded(size, lambda t: [t]))),
}


def size_of(bound: tuple[str, str]) -> int:
    size: int = getattr(LIMITS, bound[0])
    return size


def test_every_bound_of_a_field_is_tried() -> None:
    assert SIZED.keys() == {(bound.limit, bound.param) for bound in BOUNDS}


@pytest.mark.parametrize("bound", SIZED, ids=str)
def test_field_at_its_limit_passes(site: Any, engine: Any, bound: tuple[str, str]) -> None:
    engine.context_length = 100_000
    path, make = SIZED[bound]
    answer = site.post(path, **make(size_of(bound)))
    if answer.status_code != 200:  # for another reason
        assert answer.json()["error"]["code"] != "limit_exceeded"
        assert bound[0] == "max_tools_bytes" or path == EMBEDDINGS, answer.text


@pytest.mark.parametrize("bound", SIZED, ids=str)
def test_field_behind_its_limit_is_refused_by_name(
    site: Any, engine: Any, bound: tuple[str, str]
) -> None:
    engine.context_length = 100_000
    path, make = SIZED[bound]
    error = site.refusal(path, 400, **make(size_of(bound) + 1))
    assert (error["param"], error["code"]) == (bound[1], "limit_exceeded")
    assert "--" + bound[0].replace("_", "-") in error["message"]
    assert len(error["message"]) < 300
    assert engine.samplings == []


def natives(size: int, **last: Any) -> Json:
    """Prompts of which the last has other parameters."""
    return {"text": ["x"] * size, "sampling_params": [{"n": 8}] * (size - 1) + [{"n": 8} | last]}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", ["x"] * 17),
        ("regex", "a" * 70_000),
        ("logit_bias", {str(k): 1 for k in range(1025)}),
    ],
)
def test_parameters_of_each_prompt_are_within_the_limits(
    site: Any, engine: Any, name: str, value: Any
) -> None:
    error = site.refusal(NATIVE, 400, **natives(3, **{name: value}))
    assert (error["param"], error["code"]) == (f"sampling_params[2].{name}", "limit_exceeded")
    assert engine.samplings == []


def test_prompts_times_n_of_a_list_of_parameters(site: Any, engine: Any) -> None:
    assert site.post(NATIVE, **natives(16)).status_code == 200
    assert len(engine.samplings) == 16
    error = site.refusal(NATIVE, 400, **natives(17))
    assert (error["param"], error["code"]) == ("sampling_params[0].n", "limit_exceeded")
    error = site.refusal(NATIVE, 400, **natives(16, n=9))
    assert (error["param"], error["code"]) == ("sampling_params[15].n", "limit_exceeded")
    assert len(engine.samplings) == 16


def test_prompts_times_n(site: Any, engine: Any) -> None:
    assert site.post(TEXT, **text(prompt=["x"] * 16, n=8)).status_code == 200
    assert site.refusal(TEXT, 400, **text(prompt=["x"] * 16, n=9))["param"] == "n"
    assert site.refusal(TEXT, 400, **text(prompt=[[1]] * 16, n=9))["param"] == "n"
    assert site.post(TEXT, **text(prompt=[1] * 16, n=9)).status_code == 200  # one prompt


@pytest.mark.parametrize("letter", ["x", "é"])
@pytest.mark.parametrize("size", [16 * 200, 16 * 200 + 2])
def test_long_text_is_refused_before_it_is_tokenized(
    site: Any, engine: Any, monkeypatch: pytest.MonkeyPatch, letter: str, size: int
) -> None:
    tokenized: list[str] = []

    def encode(tokenizer: Any, given: str, *rest: Any, **named: Any) -> list[int]:
        tokenized.append(given)
        return [1]

    monkeypatch.setattr("specengine.server.completions.encode_text", encode)
    monkeypatch.setattr("specengine.server.app.encode_text", encode)
    words = letter * (size // len(letter.encode()))
    for path, body in ((TEXT, text(prompt=words)), ("/tokenize", {"prompt": words})):
        if size == 16 * 200:
            assert site.post(path, **body).status_code == 200
        else:
            error = site.refusal(path, 400, **body)
            assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert len(tokenized) == (2 if size == 16 * 200 else 0)


@pytest.mark.parametrize("many", [False, True], ids=["one", "of several"])
@pytest.mark.parametrize(
    ("path", "param", "fields"),
    [(TEXT, "prompt", text()), ("/generate", "input_ids", {}), ("/v1/embeddings", "input", {})],
)
def test_long_lists_of_token_ids_are_refused_before_they_are_looked_at(
    site: Any, engine: Any, path: str, param: str, fields: Json, many: bool
) -> None:
    """A text among the ids is met where they fit, and is not where they do not."""
    for size, code in ((100, None), (engine.context_length - 1, "context_length_exceeded")):
        ids = [1] * size + ["x"]
        body = {"model": "fake", **fields, param: [[1], ids] if many else ids}
        error = site.refusal(path, 400, **body)
        assert (error["param"], error["code"]) == (param, code)


def test_long_chats_are_refused_before_their_template(site: Any, engine: Any) -> None:
    """One refused for its tokens was rendered and tokenized; one refused for its bytes was not."""
    parts = [{"type": "text", "text": "é" * 400}] * 2
    messages = [{"role": "user", "content": parts}, {"role": "user", "content": "x" * 1500}]
    for reason in ("tokens, and the context length", "3201 bytes of text;"):
        error = site.refusal(CHAT, 400, **chat(messages=messages))
        assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
        assert reason in error["message"]
        messages.append({"role": "user", "content": "x" * 101})


LONG_TEXT = "x" * 3300
CALLS = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": LONG_TEXT}}]
TEMPLATE = (
    "{{ extra }}{% for m in messages %}{{ m.name }}{{ m.content }}{{ m.reasoning_content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments }}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"chat_template_kwargs": {"extra": LONG_TEXT}}),
        (CHAT, {"messages": [{"role": "user", "name": LONG_TEXT, "content": "x"}]}),
        (CHAT, {"messages": [{"role": "assistant", "content": None, "tool_calls": CALLS}]}),
        ("/tokenize", {"messages": [{"role": "user", "name": LONG_TEXT, "content": "x"}]}),
        (
            "/v1/responses",
            {"input": "x", "chat_template_kwargs": {"extra": LONG_TEXT}},
        ),
    ],
    ids=["variable", "name", "call", "tokenize", "responses"],
)
def test_chat_that_its_template_makes_long_is_refused_before_it_is_tokenized(
    site: Any, engine: Any, monkeypatch: pytest.MonkeyPatch, path: str, fields: Json
) -> None:
    def encode(*args: Any) -> list[int]:
        raise AssertionError("tokenized")

    engine.tokenizer.chat_template = TEMPLATE
    monkeypatch.setattr("specengine.server.chat_plan.encode_text", encode)
    monkeypatch.setattr("specengine.server.app.encode_text", encode)
    body = fields if path == "/v1/responses" else chat(**fields) if path == CHAT else fields
    error = site.refusal(path, 400, **{"model": "fake", **body})
    param = "input" if path == "/v1/responses" else "messages"
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    assert error["message"].startswith(f"{param} has ")
    assert "bytes of text as the template has them" in error["message"]


def send(site: Any, content: bytes | Iterator[bytes]) -> httpx.Response:
    headers = {"Content-Type": "application/json"}
    response: httpx.Response = site.http.post(TEXT, content=content, headers=headers)
    return response


def in_pieces(content: bytes) -> Iterator[bytes]:
    """Sent without a declared length."""
    for start in range(0, len(content), 2**20):
        yield content[start : start + 2**20]


@pytest.mark.parametrize("in_chunks", [False, True])
def test_body_at_its_limit_passes_and_behind_it_is_413(
    site: Any, engine: Any, in_chunks: bool
) -> None:
    body = json.dumps(text()).encode()
    for more in (0, 1):
        content = body.ljust(LIMITS.max_body_bytes + more)
        response = send(site, in_pieces(content) if in_chunks else content)
        assert response.status_code == (413 if more else 200), response.text
    assert response.json()["error"]["code"] == "body_too_large"


def test_bodies_that_are_read_at_once_share_a_limit() -> None:
    """The one that passes it is refused, and what it held is free again."""
    reader = BodyReader(LimitConfig(max_buffered_bytes=1000))

    def sent(pieces: list[int], gate: asyncio.Event) -> Request:
        left = [*pieces]

        async def receive() -> Any:
            if not left:
                await gate.wait()
            body = b"x" * (left.pop(0) if left else 0)
            return {"type": "http.request", "body": body, "more_body": bool(body)}

        return Request({"type": "http", "headers": []}, receive)

    async def several() -> None:
        gate, opened = asyncio.Event(), asyncio.Event()
        opened.set()
        first = asyncio.create_task(reader.read(sent([400, 200], gate)))
        await asyncio.sleep(0)
        assert len(await reader.read(sent([400], opened))) == 400  # 1000 together
        with pytest.raises(ApiError) as caught:
            await reader.read(sent([400, 1], opened))
        assert caught.value.status == 503
        gate.set()
        assert len(await first) == 600
        assert len(await reader.read(sent([1000], opened))) == 1000

    asyncio.run(several())


def test_number_of_values_in_a_body(site: Any, engine: Any) -> None:
    """Separators are what is counted: n of them hold n + 1 values."""
    start, end = b'{"model":"fake","prompt":[1', b"]}"
    most = LIMITS.max_json_values
    for count in (most - 4, most - 3):  # a brace, a bracket and a comma stand in `start`
        error = send(site, start + b",1" * count + end).json()["error"]
        assert error["code"] == (
            "context_length_exceeded" if count == most - 4 else "limit_exceeded"
        )


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (TEXT, {f"unknown{i}": 1 for i in range(50_000)}),
        (CHAT, {"messages": [{}] * 4096}),
        ("/detokenize", {"model": None, "tokens": [""] * 50_000}),
        (TEXT, {"structured_outputs": {str(i): 1 for i in range(6_000)}}),
        (TEXT, {"structured_outputs": {"choice": [1] * 6_000}}),
    ],
    ids=["unknown", "messages", "tokens", "outputs", "choice"],
)
def test_many_errors_make_one_short_answer(site: Any, path: str, fields: Json) -> None:
    body = fields if path == "/detokenize" else {**(text() if path == TEXT else chat()), **fields}
    response = site.post(path, **body)
    assert response.status_code == 400
    assert len(response.content) < 500


def test_long_name_of_a_field_is_not_told_back(
    site: Any, engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor does it fill the log."""
    caplog.set_level(logging.INFO, "specengine.server.request_log")
    response = site.post(TEXT, **text(**{"a" * 1_000_000: 1}))
    assert response.json()["error"]["message"].startswith("aaa")
    assert response.json()["error"]["code"] == "unknown_param"
    assert len(response.content) < 5000
    until(lambda: [one for one in caplog.records if hasattr(one, "fields")])
    assert len(caplog.text) < 5000


@pytest.mark.parametrize("field", ["response_format", "structured_outputs", "metadata"])
@pytest.mark.parametrize("depth", [300, 900, 960, 5000])
def test_deep_nesting_is_refused(site: Any, engine: Any, field: str, depth: int) -> None:
    nested = "[" * depth + "]" * depth
    value = {
        "response_format": '{"type":"json_schema","json_schema":{"name":"x","schema":{"a":%s}}}',
        "structured_outputs": '{"json":{"a":%s}}',
        "metadata": "%s",
    }[field]
    content = f'{{"model":"fake","prompt":"x","{field}":{value % nested}}}'
    status = send(site, content.encode()).status_code
    assert status in (200, 400)
    if depth == 5000:
        assert status == 400


def test_limits_are_positive() -> None:
    with pytest.raises(ConfigError, match="--max-messages 0: must be greater than 0"):
        LimitConfig(max_messages=0)


def test_serving_page_shows_the_list_of_limits() -> None:
    rows = [
        f"| `{one.flag}` | {one.default:,} | {one.help} |" for one in LimitConfig.options().values()
    ]
    page = (Path(__file__).parents[2] / "docs/serving.md").read_text()
    found = re.findall(r"^\| `--[a-z-]+` \| [\d,.]+ \| .*$", page, re.MULTILINE)
    assert found == rows, "docs/serving.md must have these rows:\n" + "\n".join(rows)
