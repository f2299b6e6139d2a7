"""The real openai client asks the real server for output of a certain form."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from tests.e2e.test_server_engine import Live, live
from tests.halves import each_value

__all__ = ["live"]  # the fixture

MESSAGES: Any = [{"role": "user", "content": "abcabc"}]


class Answer(BaseModel):
    ok: bool
    number: int


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "number": {"enum": [1, 22, 333]}},
    "required": ["ok", "number"],
    "additionalProperties": False,
}


def test_chat_answers_follow_a_schema(live: Live) -> None:
    answer = live.client.chat.completions.create(
        model="small",
        messages=MESSAGES,
        max_tokens=400,
        n=3,
        seed=1,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA},
        },
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        Answer.model_validate_json(choice.message.content or "")


@pytest.mark.parametrize("stream", [False, True])
def test_text_completions_follow_a_regex(live: Live, stream: bool) -> None:
    answer: Any = live.client.completions.create(
        model="small",
        prompt="abcabcabc",
        max_tokens=60,
        stream=stream,
        extra_body={"structured_outputs": {"regex": "(abc|é){5}"}},
    )
    parts = answer if stream else [answer]
    text = "".join(part.choices[0].text for part in parts)
    assert re.fullmatch("(abc|é){5}", text)


def test_a_json_object(live: Live) -> None:
    answer = live.client.chat.completions.create(
        model="small",
        messages=MESSAGES,
        max_tokens=400,
        seed=3,
        logit_bias={"95": 5},  # "}"
        response_format={"type": "json_object"},
    )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("completions", {"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ("completions", {"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ("completions", {"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar"),
    (
        "completions",
        {"structured_outputs": {"regex": "(a{1000}){1000}"}},
        "structured_outputs.regex",
    ),
    (
        "completions",
        {"structured_outputs": {"grammar": 'start: start "a"'}},
        "structured_outputs.grammar",
    ),
    (
        "completions",
        {"structured_outputs": {"json": {"$ref": "#"}}},
        "structured_outputs.json",
    ),
    (
        "completions",
        {"structured_outputs": {"json": "[" * 960 + "]" * 960}},
        "structured_outputs.json",
    ),
    (
        "chat/completions",
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "nothing"}},
            }
        },
        "response_format",
    ),
]


@pytest.mark.parametrize(
    ("path", "fields", "param", "stream"), each_value(1, REFUSED, [False, True]), ids=str
)
def test_grammars_that_do_not_compile_are_refused(
    live: Live, path: str, fields: dict[str, Any], param: str, stream: bool
) -> None:
    source = {"prompt": "x"} if path == "completions" else {"messages": MESSAGES}
    answer = httpx.post(
        f"{live.url}/v1/{path}", json={"model": "small", "stream": stream, **source, **fields}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert "<state>" not in answer.json()["error"]["message"]
    assert "does not compile" in answer.json()["error"]["message"]
    assert not live.engine.has_work
