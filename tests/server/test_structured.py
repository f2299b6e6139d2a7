"""Fields that ask for a form, on both endpoints: understood, or refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import OpenAI
from pydantic import BaseModel

from specengine.core.errors import RequestError
from specengine.core.grammar import GrammarSpec

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "fake", "messages": [{"role": "user", "content": "hi"}]},
    TEXT: {"model": "fake", "prompt": "hi"},
}
SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}, "required": ["é"]}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}

FORMS: list[tuple[dict[str, Any], GrammarSpec | None]] = [
    ({"response_format": None}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, GrammarSpec.json_object()),
    ({"response_format": JSON_SCHEMA}, GrammarSpec.json_schema(SCHEMA)),
    ({"structured_outputs": {"json": SCHEMA}}, GrammarSpec.json_schema(SCHEMA)),
    ({"structured_outputs": {"json": "{}", "regex": None}}, GrammarSpec.json_schema("{}")),
    ({"structured_outputs": {"json_object": True}}, GrammarSpec.json_object()),
    ({"structured_outputs": {"regex": "a+"}}, GrammarSpec.regex("a+")),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, GrammarSpec.choice(["yes", "no"])),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, GrammarSpec.ebnf('start: "a"')),
    (
        {"response_format": {"type": "text"}, "structured_outputs": {"regex": "a"}},
        GrammarSpec.regex("a"),
    ),
]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(("fields", "grammar"), FORMS, ids=str)
def test_forms(
    site: Any, engine: Any, path: str, fields: dict[str, Any], grammar: GrammarSpec | None
) -> None:
    assert site.post(path, **BODIES[path], **fields).status_code == 200
    assert engine.samplings[-1].grammar == grammar


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        ({"response_format": {}}, "response_format.type", "required"),
        ({"response_format": "json"}, "response_format", ""),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "belongs with",
        ),
        (
            {"response_format": {**JSON_SCHEMA, "type": "json_object"}},
            "response_format.json_schema",
            "belongs with",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "required",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "0 are given"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs", "0 are given"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "2 are given"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "list of texts"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice", "list of texts"),
        ({"structured_outputs": {"choice": "ab"}}, "structured_outputs.choice", "valid list"),
        ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex", "valid string"),
        (
            {"structured_outputs": {"structural_tag": "x"}},
            "structured_outputs.structural_tag",
            "not a parameter",
        ),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "give one of them",
        ),
        ({"guided_regex": "a"}, "guided_regex", "not a parameter"),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_refusals(
    site: Any, engine: Any, path: str, fields: dict[str, Any], param: str, message: str
) -> None:
    error = site.refusal(path, 400, **BODIES[path], **fields)
    assert error["param"] == param
    assert message in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_does_not_compile_is_a_400(site: Any, engine: Any, stream: bool) -> None:
    """The engine finds out; the field is the one that the client sent."""
    engine.error = RequestError("structured_outputs.regex does not compile", "structured_outputs")
    fields = {"structured_outputs": {"regex": "("}, "stream": stream}
    error = site.refusal(CHAT, 400, **BODIES[CHAT], **fields)
    assert error["param"] == "structured_outputs"


def test_param_of_a_grammar_is_the_field(site: Any, engine: Any) -> None:
    for fields, param in (
        ({"response_format": JSON_SCHEMA}, "response_format"),
        ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json"),
    ):
        assert site.post(CHAT, **BODIES[CHAT], **fields).status_code == 200
        assert engine.samplings[-1].grammar.param == param


class Answer(BaseModel):
    text: str


def test_openai_parse_sends_a_schema(openai_client: OpenAI, engine: Any) -> None:
    """The client derives the schema from a class, and reads the answer into it."""
    engine.script = json.dumps({"text": "hi"})
    answer = openai_client.chat.completions.parse(
        model="fake", messages=[{"role": "user", "content": "x"}], response_format=Answer
    )
    assert answer.choices[0].message.parsed == Answer(text="hi")
    grammar = engine.samplings[-1].grammar
    assert grammar.kind == "json_schema"
    assert json.loads(grammar.text)["properties"].keys() == {"text"}
