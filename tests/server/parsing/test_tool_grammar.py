"""Grammars of answers: what they allow, and that it parses."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from functools import cache
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specengine.core.errors import RequestError
from specengine.core.grammar import GrammarSpec, GrammarState
from specengine.engine.detokenizer import IncrementalDecoder
from specengine.engine.grammar.compiler import GrammarCompiler
from specengine.engine.tokens import encode_text, special_ids
from specengine.server.reasoning.tags import Stage
from specengine.server.tools.constrain import Rules, answer_grammar
from specengine.server.tools.format import Tool
from specengine.server.tools.registry import FORMATS
from tests.server.parsing.answers import SCHEMA, TOOLS, dialect, parse
from tests.support.grammars import mask_of

EOS = 256
STRICT = {name: Tool(name, tool.parameters, is_strict=True) for name, tool in TOOLS.items()}
PLAIN = ("hermes", "llama3_json", "pythonic", "glm45", "qwen3_coder", "deepseek_v3")
SPECIAL = {"mistral", "gpt_oss", "deepseek_v31"}  # the markers are special tokens


@cache
def world(name: str) -> tuple[Any, GrammarCompiler]:
    """A byte-level tokenizer with the markers of a format, and its compiler."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(alphabet)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    one = dialect(name)
    markers = [*FORMATS[name].markers, *(one.reasoning.markers if one.reasoning else ())]
    is_special = name in SPECIAL
    markers += ["</parameter>"]  # in one token, for no chance spells it
    added = [AddedToken(text, special=is_special, normalized=False) for text in markers]
    bytes_only.add_tokens([AddedToken("<eos>", special=True, normalized=False), *added])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_only, eos_token="<eos>")
    return tokenizer, GrammarCompiler(tokenizer, len(tokenizer), frozenset({EOS}))


def start(name: str, rules: Rules, stage: Stage = Stage.BEFORE) -> GrammarState:
    tokenizer, compiler = world(name)
    one = dialect(name)
    markers = [*FORMATS[name].markers, *(one.reasoning.markers if one.reasoning else ())]
    special = special_ids(tokenizer, markers)
    assert bool(special) == (name in SPECIAL)
    spec = answer_grammar(rules, one.tools, one.reasoning, stage, special)
    assert spec is not None
    return compiler.start(spec)


def allows(name: str, rules: Rules, text: str, stage: Stage = Stage.BEFORE) -> bool:
    """Whether the text is a whole answer, as tokens with its markers among them."""
    state = start(name, rules, stage)
    if not all(state.accept(token) for token in encode_text(world(name)[0], text, False)):
        return False
    return state.is_complete or EOS in mask_of(state, len(world(name)[0]))


def must(*tools: Tool, **fields: Any) -> Rules:
    return Rules(tools, must_call=True, **fields)


def say(name: str, rules: Rules, seed: int) -> str | None:
    """What a model says that draws tokens at random, though it likes to end strings and objects.
    None where it comes to no end."""
    tokenizer, _ = world(name)
    state, draw, said = start(name, rules), random.Random(seed), list[int]()
    likes = set(encode_text(tokenizer, '"})]\n<,/')).union(range(EOS, len(tokenizer)))
    while len(said) < 1000:
        if state.is_complete:
            break
        legal = sorted(mask_of(state, len(tokenizer)))
        liked = [token for token in legal if token in likes]
        token = draw.choice(liked if liked and draw.random() < 0.9 else legal)
        assert state.accept(token)
        if token == EOS:
            break
        said.append(token)
    else:
        return None
    return IncrementalDecoder(tokenizer, skip_special_tokens=False).add(said, final=True)


@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", FORMATS)
def test_what_a_grammar_lets_a_model_say_is_calls(name: str, seed: int, is_strict: bool) -> None:
    rules = must(*(STRICT if is_strict else TOOLS).values())
    texts = (say(name, rules, 10 * seed + again) for again in range(10))
    text = next(text for text in texts if text is not None)
    parsed = parse(name, [text])
    assert parsed.calls, text
    assert parsed.content == "" or name == "gpt_oss"
    for called, arguments in parsed.calls:
        values = json.loads(arguments)
        assert called in TOOLS
        assert isinstance(values, dict)
        if called != "add":
            assert isinstance(values["city"], str)
            assert set(values) <= set(SCHEMA["properties"])
            assert isinstance(values.get("days", 0), int)
            assert values.get("unit", "C") in ("C", "F")


HERMES = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "stage", "is_allowed"),
    [
        (HERMES, Stage.BEFORE, True),
        (f"{HERMES}\n{HERMES}", Stage.BEFORE, True),
        (f"<think>a <tool_call> b</think>\n\n{HERMES}", Stage.BEFORE, True),
        (f"a</think>{HERMES}", Stage.INSIDE, True),
        (HERMES, Stage.INSIDE, False),
        (f"<think>a</think>{HERMES}", Stage.AFTER, False),
        ("text", Stage.BEFORE, False),
        (f"text {HERMES}", Stage.BEFORE, False),
        ("", Stage.BEFORE, False),
        (HERMES.replace("add", "sub"), Stage.BEFORE, False),
        (HERMES.replace("{}", '{"a": 1}'), Stage.BEFORE, False),
    ],
)
def test_a_call_must_come(text: str, stage: Stage, is_allowed: bool) -> None:
    assert allows("hermes", must(TOOLS["add"]), text, stage) is is_allowed


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ("", True),
        ("text < <tool", True),
        (f"text {HERMES}", True),
        (f"<think>a <tool_call> b</think>text {HERMES}", True),
        ("<think>a <tool_call> b</think>text", True),
        ("text <tool_call> b", False),
        (f"text {HERMES.replace('{}', '[]')}", False),
    ],
)
def test_a_strict_call_may_come(text: str, is_allowed: bool) -> None:
    assert allows("hermes", Rules([STRICT["add"]]), text) is is_allowed


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama3_json", '{"name": "add", "parameters": {}}'),
        ("pythonic", "[add()]"),
        ("mistral", "so[TOOL_CALLS]add[ARGS]{}"),
        ("deepseek_v31", "so<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{}"
         "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
        ("glm45", "so<tool_call>add\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=add>\n</function>\n</tool_call>"),
        ("gpt_oss", "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>commentary"
         " to=functions.add <|constrain|>json<|message|>{}"),
    ],
)  # fmt: skip
def test_strict_calls_of_every_format(name: str, text: str) -> None:
    rules = Rules([STRICT["add"]])
    assert allows(name, rules, text)
    assert not allows(name, rules, text.replace("add", "sub"))
    other = "<|channel|>final<|message|>text" if name == "gpt_oss" else "text"
    assert allows(name, rules, other)


def test_one_call_where_only_one_may_come() -> None:
    rules = must(TOOLS["add"], is_parallel=False)
    assert allows("hermes", rules, HERMES)
    assert not allows("hermes", rules, f"{HERMES}\n{HERMES}")


FORMS = [
    GrammarSpec.json_schema({"type": "integer"}),
    GrammarSpec.regex("[0-9]+"),
    GrammarSpec.choice(["5", "7"]),
    GrammarSpec.ebnf("start: /[0-9]/"),
]


@pytest.mark.parametrize("body", FORMS, ids=lambda body: body.kind)
def test_a_form_holds_for_what_follows_reasoning_and_is_no_call(body: GrammarSpec) -> None:
    reasons = Rules(body=body)
    assert allows("hermes", reasons, "5")
    assert allows("hermes", reasons, "<think>hm</think>\n\n5")
    assert allows("hermes", reasons, "hm</think>5", Stage.INSIDE)
    assert not allows("hermes", reasons, "hm</think>x", Stage.INSIDE)
    assert not allows("hermes", reasons, "5", Stage.INSIDE)
    calls = Rules([TOOLS["add"]], body=body)
    assert allows("hermes", calls, "5")
    assert allows("hermes", calls, HERMES)
    assert not allows("hermes", calls, "text")
    assert allows("gpt_oss", reasons, "<|channel|>final<|message|>5")
    assert not allows("gpt_oss", reasons, "<|channel|>final<|message|>x")


def test_without_tools_or_form_everything_is_allowed() -> None:
    one = dialect("hermes")
    assert answer_grammar(Rules(), one.tools, one.reasoning, Stage.BEFORE, {}) is None
    body = GrammarSpec.json_object()
    assert answer_grammar(Rules(body=body), one.tools, None, Stage.BEFORE, {}) is body


@pytest.mark.parametrize(
    ("name", "schema", "word"),
    [
        ("pythonic", {"type": "string", "pattern": "a+"}, "pattern"),
        ("pythonic", {"type": "array", "items": {"minimum": 1}}, "minimum"),
        ("pythonic", {"$ref": "#/nowhere"}, "leads to no part"),
        ("pythonic", {"type": "text"}, "no type"),
        ("glm45", {"type": "string", "maxLength": 3}, "maxLength"),
    ],
)
def test_what_cannot_be_enforced_is_refused(name: str, schema: Any, word: str) -> None:
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    with pytest.raises(RequestError, match=word) as caught:
        start(name, must(Tool("f", parameters, is_strict=True)))
    assert caught.value.param == "tools"


@pytest.mark.parametrize("name", ["hermes", "pythonic", "glm45"])
@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": [1]},
        {"properties": {"a": 5}, "required": 7},
        {"properties": {"a": {"type": 5, "enum": "x", "anyOf": {"b": 1}}}},
        {"properties": {"a": {"type": {"b": 1}}}},
        {"properties": {"a": {"type": "string", "enum": [[]], "anyOf": 3}}, "required": ["a"]},
        {"properties": {"a": {"$ref": 4}}},
        {"properties": {"a": {"type": "array", "items": "x"}}},
        {"properties": {"\ud800": {"type": "integer"}}},
        {"type": ["object", 3]},
    ],
)
def test_schemas_that_are_none_are_followed_or_refused(name: str, parameters: Any) -> None:
    for is_strict in (False, True):
        with suppress(RequestError):
            start(name, must(Tool("f", parameters, is_strict)))
    text = "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x</arg_value>\n</tool_call>"
    parser = dialect("glm45").parser({"f": Tool("f", parameters)}, Stage.BEFORE, None)
    assert parser is not None
    answer = parser().feed(text, ended=True)
    assert answer[1].text == '{"a": "x"}'


def test_python_schemas() -> None:
    node = {
        "type": "object",
        "properties": {
            "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            "kind": {"enum": ["a'b", 1, None, [True], {"k": 1.5}]},
        },
        "required": ["next"],
    }
    parameters = {
        "type": "object",
        "properties": {"x": {"type": ["number", "boolean"]}, "node": {"$ref": "#/$defs/node"},
                       "tags": {"type": "array", "items": {"type": "string"}}},
        "required": ["node"],
        "$defs": {"node": node},
    }  # fmt: skip
    rules = must(Tool("f", parameters, is_strict=True))
    for text in (
        '[f(node={"next": None})]',
        '[f(x=-1.5e3, node={"next": {"next": None, "kind": "a\'b"}}, tags=["", "\\n"])]',
        '[f(x=True, node={"next": None, "kind": {"k": 1.5}}, tags=[]), f(node={"next": None})]',
    ):
        assert allows("pythonic", rules, text), text
        for _, arguments in parse("pythonic", [text]).calls:
            assert json.loads(arguments)["node"]
    for text in ("[f()]", "[f(node=None)]", '[f(node={"next": 1})]', '[f(node={"kind": 1})]'):
        assert not allows("pythonic", rules, text), text
