"""Answers in every format, what is in them, and how they are parsed in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specengine.server.dialect import Dialect
from specengine.server.parsing.answer import ParsedAnswer
from specengine.server.reasoning.registry import REASONING
from specengine.server.reasoning.tags import Stage
from specengine.server.tools.format import AnswerFormat, Tool
from specengine.server.tools.registry import FORMATS

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "more": {},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = {name: Tool(name, SCHEMA) for name in ("weather", "f")}
TOOLS["add"] = Tool("add")


@dataclass(frozen=True)
class Parsed:
    """calls: (name, arguments)."""

    content: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Case:
    format: str
    text: str
    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    reasoning: str = ""
    stage: Stage = Stage.BEFORE

    @property
    def parsed(self) -> Parsed:
        return Parsed(self.content, self.reasoning, self.calls)


def dialect(name: str) -> Dialect:
    one = FORMATS[name]
    tags = REASONING["mistral" if name == "mistral" else "qwen3"]
    return Dialect(one, None if isinstance(one, AnswerFormat) else tags)


def parse(
    name: str, pieces: Sequence[str], stage: Stage = Stage.BEFORE, most_calls: int | None = None
) -> Parsed:
    """What the deltas add up to; they agree with the whole answer, and each call's name comes
    before its arguments."""
    make = dialect(name).parser(TOOLS, stage, most_calls)
    assert make is not None
    parser = make()
    content, reasoning, calls = "", "", list[list[str]]()
    for number, piece in enumerate(pieces):
        for delta in parser.feed(piece, ended=number == len(pieces) - 1):
            assert delta.text
            if delta.kind == "call":
                assert delta.call == len(calls)
                assert delta.id == parser.answer.calls[delta.call].id
                calls.append([delta.text, ""])
            elif delta.kind == "arguments":
                assert delta.call == len(calls) - 1
                calls[-1][1] += delta.text
            elif delta.kind == "content":
                content += delta.text
            else:
                reasoning += delta.text
    parsed = Parsed(content, reasoning, tuple((name, text) for name, text in calls))
    assert parsed == whole_of(parser.answer)
    return parsed


def whole_of(answer: ParsedAnswer) -> Parsed:
    calls = tuple((call.name, call.arguments) for call in answer.calls)
    return Parsed(answer.content, answer.reasoning, calls)


V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
V3_END = "\n```<｜tool▁call▁end｜>"
OSS = "<|start|>assistant"

CASES = [
    Case("hermes", "  Hello\n<b> there \n", "  Hello\n<b> there \n"),
    Case("hermes", "", ""),
    Case("hermes", "<tool_cal", "<tool_cal"),
    Case(
        "hermes",
        'I look. \n<tool_call>\n{"name": "weather", "arguments": {"city": "Pa\\"r{is</tool_call>", '
        '"days": [1, {"a": 2}]}}\n</tool_call>\n<tool_call>\n'
        '{"arguments": "{\\"a\\": \\"\\ud83d\\ude00\\u00e9\\\\n\\"}", "name": "f"}</tool_call>\n'
        "after <b>\n",
        "I look.\nafter <b>",
        (
            ("weather", '{"city": "Pa\\"r{is</tool_call>", "days": [1, {"a": 2}]}'),
            ("f", '{"a": "😀é\\n"}'),
        ),
    ),
    Case(
        "hermes",
        '<think>\nHm <tool_call>\n</think>\n\n<tool_call>{"name": "add"}</tool_call>',
        reasoning="Hm <tool_call>",
        calls=(("add", "{}"),),
    ),
    Case("hermes", "so \n</think>\n\n Yes ", "Yes ", reasoning="so", stage=Stage.INSIDE),
    Case("hermes", "so </thin", "", reasoning="so </thin", stage=Stage.INSIDE),
    Case("hermes", "a <think>b</think>", "a <think>b</think>"),
    Case(
        "hermes",
        '<tool_call>{"name": "f", "id": [1, "}"], "arguments": null}</tool_call>',
        calls=(("f", "{}"),),
    ),
    # Malformed: what is no call is content, and arguments are handed on as they are.
    Case("hermes", "<tool_call>{'name': 1}</tool_call> x", "<tool_call>{'name': 1}</tool_call> x"),
    Case("hermes", '<tool_call>{"nam', '<tool_call>{"nam'),
    Case("hermes", '<tool_call>{"name": ""}', '<tool_call>{"name": ""}'),
    Case(
        "hermes",
        '<tool_call>{"name": "f", "arguments": {\'a\': 1}}</tool_call>then',
        "then",
        (("f", "{'a': 1}}"),),
    ),
    Case(
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": [1}}</tool_call>',
        calls=(("f", '{"a": [1}}'),),
    ),
    Case(
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "b\\',
        calls=(("f", '{"a": "b\\'),),
    ),
    Case(
        "llama3_json",
        ' {"name": "weather", "parameters": {"city": "é😀"}}; {"name": "add", "parameters": {}}',
        calls=(("weather", '{"city": "é😀"}'), ("add", "{}")),
    ),
    Case(
        "llama3_json",
        'Hm. <|python_tag|>{"name": "f", "arguments": {"city": "a;b"}} ok',
        "Hm.\nok",
        (("f", '{"city": "a;b"}'),),
    ),
    Case(
        "llama3_json",
        '[{"name": "f", "parameters": {}}, {"name": "add"}]',
        calls=(("f", "{}"), ("add", "{}")),
    ),
    Case("llama3_json", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}'),
    Case("llama3_json", '{"name"', '{"name"'),
    Case(
        "pythonic",
        "[weather(city=\"Pa'r\\n]\\u00e9\\x41\\q\", days=-3), f(more={'a': [1, (2.5,), None, True]"
        "}, city='''x'\"y'''), add( )] done",
        "done",
        (
            ("weather", '{"city": "Pa\'r\\n]éA\\\\q", "days": -3}'),
            ("f", '{"more": {"a": [1, [2.5], null, true]}, "city": "x\'\\"y"}'),
            ("add", "{}"),
        ),
    ),
    Case("pythonic", "<|python_start|>[add()]<|python_end|>", calls=(("add", "{}"),)),
    Case("pythonic", "[1, 2] and [add()]", "[1, 2] and [add()]"),
    Case("pythonic", "[weather(1)]", "[weather(1)]"),
    Case("pythonic", "[unknown(a=1)]", "[unknown(a=1)]"),
    Case("pythonic", "[f(city=oops)]", calls=(("f", '{"city": oops)]'),)),
    Case("pythonic", '[f(city="a', calls=(("f", '{"city": "a'),)),
    Case("pythonic", "[f(more=" + "[" * 99, calls=(("f", '{"more": ' + "[" * 98),)),
    Case(
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "]"}}, {"name": "add", "arguments": {}}]',
        calls=(("f", '{"a": "]"}'), ("add", "{}")),
    ),
    Case(
        "mistral",
        '[THINK]hm[/THINK]Well[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]add[CALL_ID]abc[ARGS]{}',
        "Well",
        (("f", '{"a": 1}'), ("add", "{}")),
        "hm",
    ),
    Case("mistral", "[TOOL_CALLS] nothing", "[TOOL_CALLS] nothing"),
    Case("mistral", "[TOOL_CALLS][", "[TOOL_CALLS]["),
    Case(
        "deepseek_v3",
        f'Hi<｜tool▁calls▁begin｜>{V3}f\n```json\n{{"a": "```"}}{V3_END}\n{V3}add\n```json\n{{}}'
        f"{V3_END}<｜tool▁calls▁end｜>",
        "Hi",
        (("f", '{"a": "```"}'), ("add", "{}")),
    ),
    Case("deepseek_v3", f"<｜tool▁calls▁begin｜>{V3}f", f"<｜tool▁calls▁begin｜>{V3}f"),
    Case(
        "deepseek_v31",
        'a</think>b<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}'
        "<｜tool▁call▁end｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        "b",
        (("f", '{"a": 1}'), ("add", "{}")),
        "a",
        Stage.INSIDE,
    ),
    Case("deepseek_v31", "<｜tool▁calls▁begin｜>no", "<｜tool▁calls▁begin｜>no"),
    Case(
        "glm45",
        '<think></think>\nok\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>New "Y"\n'
        "</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>more</arg_key>\n"
        "<arg_value>NaN</arg_value>\n<arg_key>unit</arg_key><arg_value>C</arg_value></tool_call>\n"
        "<tool_call>add</tool_call>",
        "ok",
        (
            ("weather", '{"city": "New \\"Y\\"\\n", "days": 3, "more": "NaN", "unit": "C"}'),
            ("add", "{}"),
        ),
    ),
    Case("glm45", "<tool_call>\n</tool_call>", "<tool_call>\n</tool_call>"),
    Case(
        "glm45",
        "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Par",
        calls=(("f", '{"city": "Par'),),
    ),
    Case(
        "qwen3_coder",
        "<tool_call>\n<function=weather>\n<parameter=city>\n Line 1\nLine </p>2\n\n</parameter>\n"
        "<parameter=more>\n{'a'}</parameter>\n</function>\n</tool_call>",
        calls=(("weather", '{"city": " Line 1\\nLine </p>2\\n", "more": "{\'a\'}"}'),),
    ),
    Case("qwen3_coder", "<tool_call>\n<function=f", "<tool_call>\n<function=f"),
    Case(
        "gpt_oss",
        f"<|channel|>analysis<|message|>one<|end|>{OSS}<|channel|>analysis<|message|>two <|end|>"
        f"{OSS}<|channel|>commentary<|message|>I call.<|end|>{OSS}<|channel|>commentary "
        'to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>',
        "I call.",
        (("f", '{"a": 1}'),),
        "one\ntwo",
    ),
    Case(
        "gpt_oss",
        " to=functions.add<|channel|>commentary json<|message|>",
        calls=(("add", "{}"),),
    ),
    Case("gpt_oss", "<|channel|>final<|message|>4 < 5 <|return|>", "4 < 5 "),
    Case("gpt_oss", "<|channel|>final<|mess", ""),
    Case("gpt_oss", "to=functions. <|message|>{}", calls=(("functions.", "{}"),)),
    Case("gpt_oss", "Hello", "Hello"),
]
