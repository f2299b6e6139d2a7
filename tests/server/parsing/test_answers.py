"""Answers parsed in any pieces give what the whole text gives."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from specengine.core.config import REASONING_PARSERS, TOOL_PARSERS
from specengine.server.dialect import dialect_of
from specengine.server.reasoning.registry import REASONING
from specengine.server.tools.format import AnswerFormat
from specengine.server.tools.registry import FORMATS, detect_format
from tests.server.parsing.answers import CASES, Case, parse

NAMED = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.format} {case.text[:20]}")


@NAMED
def test_whole_text(case: Case) -> None:
    assert parse(case.format, [case.text], case.stage) == case.parsed


@NAMED
def test_text_cut_anywhere(case: Case) -> None:
    text = case.text
    assert parse(case.format, [*text, ""], case.stage) == case.parsed
    for at in range(len(text) + 1):
        assert parse(case.format, [text[:at], text[at:]], case.stage) == case.parsed
        assert parse(case.format, [text[:at], "", text[at:], ""], case.stage) == case.parsed


@NAMED
def test_truncated_text_gives_the_same_in_pieces(case: Case) -> None:
    for end in range(len(case.text)):
        text = case.text[:end]
        whole = parse(case.format, [text], case.stage)
        assert parse(case.format, [*text, ""], case.stage) == whole
        names = [name for name, _ in case.calls]
        assert [name for name, _ in whole.calls] == names[: len(whole.calls)]


@given(st.sampled_from(CASES), st.data())
def test_mutated_text_gives_the_same_in_pieces(case: Case, data: Any) -> None:
    """Characters are dropped, doubled and exchanged; then the text is cut at random places."""
    letters = list(case.text)
    for _ in range(data.draw(st.integers(0, 4)) if letters else 0):
        at = data.draw(st.integers(0, len(letters) - 1))
        letters[at] *= data.draw(st.integers(0, 2))
        other = data.draw(st.integers(0, len(letters) - 1))
        letters[at], letters[other] = letters[other], letters[at]
    text = "".join(letters)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(case.format, pieces, case.stage) == parse(case.format, [text], case.stage)


TEXTS = st.text(max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


# What ends a value in these formats, and so cannot be within one: tokens of their own, which a
# model does not write as text, or tags that nothing escapes.
ENDS = {
    "gpt_oss": ("<|end|>", "<|call|>", "<|return|>", "<|start|>"),
    "glm45": ("</arg_value>",),
    "qwen3_coder": ("</parameter>",),
}


def written(name: str, city: str, days: int, more: Any) -> str:
    """A call of weather with these arguments, as the model of a format writes it."""
    arguments = json.dumps({"city": city, "days": days, "more": more}, ensure_ascii=False)
    value = json.dumps(more)
    return {
        "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>',
        "llama3_json": f'{{"name": "weather", "parameters": {arguments}}}',
        "mistral": f'[TOOL_CALLS][{{"name": "weather", "arguments": {arguments}}}]',
        "pythonic": f"[weather(city={city!r}, days={days}, more={more!r})]",
        "glm45": f"<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>{city}</arg_value>\n"
        f"<arg_key>days</arg_key>\n<arg_value>{days}</arg_value>\n"
        f"<arg_key>more</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>",
        "qwen3_coder": f"<tool_call>\n<function=weather>\n<parameter=city>\n{city}\n</parameter>\n"
        f"<parameter=days>\n{days}\n</parameter>\n"
        f"<parameter=more>\n{value}\n</parameter>\n</function>\n</tool_call>",
        "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
        f"```json\n{arguments}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
        f"{arguments}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "gpt_oss": "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        + arguments,
    }[name]


@pytest.mark.parametrize("name", FORMATS)
@given(TEXTS, st.integers(), VALUES, st.integers(1, 7))
def test_any_arguments_come_back(name: str, city: str, days: int, more: Any, size: int) -> None:
    values = city, json.dumps(more)
    assume(not any(end in value for end in ENDS.get(name, ()) for value in values))
    text = written(name, city, days, more)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    parsed = parse(name, [*pieces, ""])
    assert parsed.content == ""
    ((called, arguments),) = parsed.calls
    assert called == "weather"
    assert json.loads(arguments) == {"city": city, "days": days, "more": more}


def test_calls_beyond_the_most_are_dropped() -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    parsed = parse("hermes", [*(call * 3), "tail"], most_calls=1)
    assert parsed.calls == (("f", '{"a": 1}'),)
    assert parsed.content == "tail"


def test_configuration_names_the_parsers() -> None:
    whole = {name for name, one in FORMATS.items() if isinstance(one, AnswerFormat)}
    assert {*TOOL_PARSERS} == {"auto", "none", *FORMATS}
    assert {*REASONING_PARSERS} == {"auto", "none", *whole, *REASONING}


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% if tools %}<tools></tools><tool_call>{% endif %}", "hermes"),
        ("<tool_call>\n<function=x>\n<parameter=y>", "qwen3_coder"),
        ("<tool_call>{{ name }}<arg_key>", "glm45"),
        ("[AVAILABLE_TOOLS][TOOL_CALLS]", "mistral"),
        ("<｜tool▁calls▁begin｜>```json", "deepseek_v3"),
        ("<｜tool▁calls▁begin｜>", "deepseek_v31"),
        ("<|start|><|channel|><|message|>", "gpt_oss"),
        ('Respond in the format {"name": function name, "parameters": dictionary', "llama3_json"),
        ("put it in the format of [func_name1(params_name1=params_value1)]", "pythonic"),
        ("{{ messages }}", None),
    ],
)
def test_format_of_a_template(template: str, name: str | None) -> None:
    assert detect_format(template) is (None if name is None else FORMATS[name])


def test_dialect_follows_the_configuration(engine: Any) -> None:
    from specengine.core.config import ServerConfig

    def of(**fields: str) -> Any:
        return dialect_of(engine.tokenizer, ServerConfig(**fields))

    assert of().tools is None
    assert of().reasoning is None
    engine.tokenizer.chat_template = "<tool_call></think>"
    assert of().tools is FORMATS["hermes"]
    assert of().reasoning is REASONING["qwen3"]
    assert of(tool_call_parser="none").tools is None
    assert of(reasoning_parser="none").reasoning is None
    assert of(tool_call_parser="mistral").tools is FORMATS["mistral"]
    assert of(reasoning_parser="gpt_oss").answer_format is FORMATS["gpt_oss"]
