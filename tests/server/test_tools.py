"""Tools and reasoning through the real openai client; a script stands in for the model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from tokenizers import AddedToken

KEY = "secret"  # of tests/server/conftest.py
CHAT = "/v1/chat/completions"
MESSAGES: Any = [{"role": "user", "content": "say hi"}]
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}"
    "{{ ' ' + m.tool_call_id if m.tool_call_id }}>{{ m.reasoning_content or '' }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.id }} {{ c.function.name }} "
    "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    "{{ mood or '' }}{{ '</think>' if enable_thinking is defined and not enable_thinking }}"
)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


def tool(name: str, **fields: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **fields}}


TOOLS = [tool("weather", description="how it is"), tool("time")]


def call(name: str, city: str) -> str:
    arguments = json.dumps({"city": city}, ensure_ascii=False)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


ANSWER = f"<think>\nHm.\n</think>\n\nI look. {call('weather', 'Gdańsk')}\n{call('time', 'Łódź 😀')}"


@pytest.fixture
def model(engine: Any) -> Any:
    """An engine whose model reasons and calls tools as Qwen3 does."""
    engine.tokenizer.chat_template = TEMPLATE
    engine.context_length = 4000
    engine.script = ANSWER
    return engine


def test_whole_answer(openai_client: OpenAI, model: Any) -> None:
    answer = openai_client.chat.completions.create(model="fake", messages=MESSAGES, tools=TOOLS)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    assert (choice.message.model_extra or {})["reasoning_content"] == "Hm."
    one, two = choice.message.tool_calls or []
    assert one.type == two.type == "function"
    assert (one.function.name, two.function.name) == ("weather", "time")
    assert json.loads(one.function.arguments) == {"city": "Gdańsk"}
    assert json.loads(two.function.arguments) == {"city": "Łódź 😀"}
    assert one.id.startswith("call_")
    assert one.id != two.id
    assert model.samplings[-1].grammar is None


def test_content_is_null_beside_calls_alone(openai_client: OpenAI, model: Any) -> None:
    model.script = call("time", "x")
    answer = openai_client.chat.completions.create(model="fake", messages=MESSAGES, tools=TOOLS)
    assert answer.choices[0].message.content is None
    assert "reasoning_content" not in (answer.choices[0].message.model_extra or {})


def test_stream(openai_client: OpenAI, model: Any) -> None:
    stream = openai_client.chat.completions.create(
        model="fake", messages=MESSAGES, tools=TOOLS, stream=True
    )
    chunks = [chunk.choices[0] for chunk in stream]
    assert [c.finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["tool_calls"]
    deltas = [chunk.delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "I look."
    thoughts = [(delta.model_extra or {}).get("reasoning_content") or "" for delta in deltas]
    assert "".join(thoughts) == "Hm."
    parts = [part for delta in deltas for part in delta.tool_calls or []]
    for index, (name, city) in enumerate([("weather", "Gdańsk"), ("time", "Łódź 😀")]):
        first, *rest = [part for part in parts if part.index == index]
        assert (first.type, first.function.name, first.function.arguments) == (
            "function",
            name,
            "",
        )
        assert first.id
        assert len(rest) > 3
        assert {(part.id, part.type, part.function.name) for part in rest} == {(None, None, None)}
        assert json.loads("".join(part.function.arguments for part in rest)) == {"city": city}


def test_stream_as_the_client_adds_it_up(openai_client: OpenAI, model: Any) -> None:
    with openai_client.chat.completions.stream(
        model="fake", messages=MESSAGES, tools=[tool("weather", strict=True)], n=2
    ) as stream:
        answer = stream.get_final_completion()
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls"
        one, two = choice.message.tool_calls or []
        assert one.function.parsed_arguments == {"city": "Gdańsk"}
        assert json.loads(two.function.arguments) == {"city": "Łódź 😀"}


@pytest.mark.parametrize("stream", [False, True])
def test_length_ends_a_call(openai_client: OpenAI, model: Any, stream: bool) -> None:
    model.script = call("weather", "Gdańsk")
    got: Any = openai_client.chat.completions.create(
        model="fake", messages=MESSAGES, tools=TOOLS, max_tokens=56, stream=stream
    )
    choices = [part.choices[0] for part in (got if stream else [got])]
    assert choices[-1].finish_reason == "length"
    parts = [p for c in choices for p in (c.delta if stream else c.message).tool_calls or []]
    assert "".join(part.function.arguments for part in parts) == '{"city": "G'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "reason", "content", "arguments"),
    [
        ("Hm.", "stop", "", ""),
        ("</think>", "stop", "", ""),
        ("look.", "stop", "I ", ""),
        ("_call>", "stop", "I look. <tool", ""),
        ("}\n</tool_call>", "tool_calls", "I look.", '{"city": "Gdańsk"}'),
        ("sk", "tool_calls", "I look.", '{"city": "Gdań'),
    ],
)
def test_stop_string(
    openai_client: OpenAI, model: Any, stream: bool, stop: str, reason: str, content: str,
    arguments: str
) -> None:  # fmt: skip
    """It ends the text wherever it stands; what came before is parsed."""
    got: Any = openai_client.chat.completions.create(
        model="fake", messages=MESSAGES, tools=TOOLS, stop=stop, stream=stream
    )
    choices = [part.choices[0] for part in (got if stream else [got])]
    said = [choice.delta if stream else choice.message for choice in choices]
    assert "".join(one.content or "" for one in said) == content
    parts = [part for one in said for part in one.tool_calls or []]
    assert "".join(part.function.arguments for part in parts) == arguments
    assert choices[-1].finish_reason == reason


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_those_of_all_tokens(site: Any, model: Any, stream: bool) -> None:
    import orjson

    body = {"model": "fake", "messages": MESSAGES, "tools": TOOLS, "logprobs": True}
    response = site.post(CHAT, **body, stream=stream)
    events = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    parts = [orjson.loads(event) for event in events] if stream else [response.json()]
    entries = [
        entry["bytes"][0]
        for part in parts
        if part["choices"][0]["logprobs"]
        for entry in part["choices"][0]["logprobs"]["content"]
    ]
    assert bytes(entries).decode() == ANSWER


def test_one_call_where_they_are_not_parallel(openai_client: OpenAI, model: Any) -> None:
    answer = openai_client.chat.completions.create(
        model="fake", messages=MESSAGES, tools=TOOLS, parallel_tool_calls=False
    )
    (one,) = answer.choices[0].message.tool_calls or []
    assert one.function.name == "weather"


def test_none_leaves_the_tools_out(openai_client: OpenAI, model: Any) -> None:
    answer = openai_client.chat.completions.create(
        model="fake", messages=MESSAGES, tools=TOOLS, tool_choice="none"
    )
    assert "how it is" not in model.prompts[-1]
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == ANSWER.split("</think>\n\n")[1]


def test_conversation_with_calls(openai_client: OpenAI, model: Any) -> None:
    """What a client sends back: the message of an earlier answer, and results."""
    first = openai_client.chat.completions.create(model="fake", messages=MESSAGES, tools=TOOLS)
    message = first.choices[0].message
    ids = [one.id for one in message.tool_calls or []]
    results: Any = [{"role": "tool", "tool_call_id": one, "content": "fine"} for one in ids]
    openai_client.chat.completions.create(
        model="fake", messages=[*MESSAGES, message, *results], tools=TOOLS
    )
    prompt = model.prompts[-1]
    assert '"description": "how it is"' in prompt
    assert "strict" not in prompt
    assert f'<assistant>Hm.I look.<tool_call>{ids[0]} weather {{"city": "Gdańsk"}}' in prompt
    assert f"<tool {ids[0]}>fine<tool {ids[1]}>fine" in prompt
    past: Any = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "time", "arguments": "{oops"}}
        ],
    }
    openai_client.chat.completions.create(model="fake", messages=[*MESSAGES, past])
    assert '<assistant><tool_call>a time "{oops"' in model.prompts[-1]


def test_templates_that_take_arguments_as_text(openai_client: OpenAI, model: Any) -> None:
    model.tokenizer.chat_template = (
        "{% for m in messages %}{{ '-' + m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}"
        "{% endfor %}{% endfor %}"
    )
    function = {"name": "time", "arguments": '{"city":"x"}'}
    past: Any = [{"id": "a", "type": "function", "function": function}]
    openai_client.chat.completions.create(
        model="fake", messages=[{"role": "assistant", "content": None, "tool_calls": past}]
    )
    assert model.prompts[-1] == '-time{"city": "x"}'


@pytest.mark.parametrize(
    ("fields", "has_grammar", "named"),
    [
        ({"tools": TOOLS}, False, ""),
        ({"tools": TOOLS, "tool_choice": "auto"}, False, ""),
        ({"tools": TOOLS, "tool_choice": "required"}, True, "weather time"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "time"}}},
         True, "time"),
        ({"tools": [*TOOLS, tool("news", strict=True)]}, True, "weather time news"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, True, "weather time"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
         True, "weather time"),
        ({"response_format": {"type": "json_object"}}, True, ""),
    ],
)  # fmt: skip
def test_when_calls_are_constrained(
    site: Any, model: Any, fields: Any, has_grammar: bool, named: str
) -> None:
    assert site.post(CHAT, model="fake", messages=MESSAGES, **fields).status_code == 200
    grammar = model.samplings[-1].grammar
    assert (grammar is not None) is has_grammar
    text = "" if grammar is None else grammar.frame or grammar.text
    assert [name for name in ("weather", "time", "news") if name in text] == named.split()


def test_markers_that_are_special_tokens(openai_client: OpenAI, model: Any) -> None:
    markers = ["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "<hidden>"]
    model.tokenizer.add_tokens([AddedToken(one, special=True) for one in markers], True)
    model.tokenizer.chat_template = "{{ tools or '' }}[TOOL_CALLS][/THINK]"
    model.script = '[THINK]Hm[/THINK]So<hidden>[TOOL_CALLS]time[ARGS]{"city": "x"}'
    answer = openai_client.chat.completions.create(model="fake", messages=MESSAGES, tools=TOOLS)
    message = answer.choices[0].message
    (one,) = message.tool_calls or []
    assert (message.content, one.function.arguments) == ("So", '{"city": "x"}')
    assert len(one.id) == 9
    plain = openai_client.chat.completions.create(model="fake", messages=MESSAGES)
    assert plain.choices[0].message.content == 'Sotime{"city": "x"}'


def test_reasoning_that_the_prompt_began_or_ended(openai_client: OpenAI, model: Any) -> None:
    model.script = "so</think>yes"
    model.tokenizer.chat_template = "{{ '<think>\n' if go }}{# </think> #}"
    create = openai_client.chat.completions.create
    inside = create(model="fake", messages=MESSAGES, extra_body=_variables(go=True))
    message = inside.choices[0].message
    assert (message.content, (message.model_extra or {})["reasoning_content"]) == ("yes", "so")
    outside = create(model="fake", messages=MESSAGES)
    assert outside.choices[0].message.content == "so</think>yes"


def _variables(**variables: Any) -> dict[str, Any]:
    return {"chat_template_kwargs": variables}


def test_variables_of_the_template(openai_client: OpenAI, model: Any) -> None:
    create = openai_client.chat.completions.create
    create(model="fake", messages=MESSAGES, extra_body=_variables(mood="glad"))
    assert model.prompts[-1].endswith("say higlad")
    create(model="fake", messages=MESSAGES, reasoning_effort="none")
    assert model.prompts[-1].endswith("</think>")
    create(model="fake", messages=MESSAGES, reasoning_effort="low")
    assert model.prompts[-1].endswith("say hi")
    model.tokenizer.chat_template = "effort: {{ reasoning_effort }}"
    create(model="fake", messages=MESSAGES, reasoning_effort="high")
    assert model.prompts[-1] == "effort: high"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": [tool("a b")]}, "tools[0].function.name", "match"),
        ({"tools": [tool("a"), tool("a")]}, "tools", "rename"),
        ({"tools": [tool("a")] * 129}, "tools", "128"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type", "function"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice", 'must be "none"'),
        ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice", 'must be "none"'),
        ({"tool_choice": "required"}, "tool_choice", "at least one"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
         "tool_choice", "add it to tools"),
        ({"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"regex": "a"}},
         "tool_choice", "give one"),
        (_variables(chat_template="{{ 1 }}"), "chat_template_kwargs.chat_template", "leave it out"),
        (_variables(tools=[]), "chat_template_kwargs.tools", "leave it out"),
        ({"reasoning_effort": "much"}, "reasoning_effort", "low"),
    ],
)  # fmt: skip
def test_refusals(site: Any, model: Any, fields: Any, param: str, message: str) -> None:
    error = site.refusal(CHAT, 400, model="fake", messages=MESSAGES, **fields)
    assert error["param"].startswith(param)
    assert message in error["message"]


def test_models_without_tools_refuse_them(site: Any, engine: Any) -> None:
    error = site.refusal(CHAT, 400, model="fake", messages=MESSAGES, tools=TOOLS)
    assert "takes no tools" in error["message"]
    engine.tokenizer.chat_template = "{{ tools }}"
    error = site.refusal(CHAT, 400, model="fake", messages=MESSAGES, tools=TOOLS)
    assert "--tool-call-parser" in error["message"]


def test_the_documented_example_runs(
    site: Any, model: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs/serving.md").read_text()
    (example,) = re.findall(r"```python\n(import json.*?)```", page, re.DOTALL)
    for documented, real in (("http://127.0.0.1:8000", site.url), ('"none"', repr(KEY))):
        assert documented in example
        example = example.replace(documented, real)
    model.script = call("weather", "Łódź")
    say = model.generate

    def generate(*args: Any, **kwargs: Any) -> Any:
        outputs = say(*args, **kwargs)
        if len(model.prompts) > 0:
            model.script = "It is 24 degrees."
        return outputs

    monkeypatch.setattr(model, "generate", generate)
    exec(example, {})
    assert capsys.readouterr().out == "It is 24 degrees.\n"
    assert "Łódź: 24 degrees" in model.prompts[-1]
    assert model.samplings[0].grammar is not None
