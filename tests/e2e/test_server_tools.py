"""The real openai client, the real server and engine: calls that must come, drafted or not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_server_engine import Live, served

JSON = '{"city": "Paris", "days": 22}'
# Drafts come from the prompt, which shows each format.
SHOWN = f'<tool_call>\n{{"name": "weather", "arguments": {JSON}}}\n</tool_call>'
SHOWN += '[weather(city="Paris", days=22)]<tool_call>weather\n<arg_key>city</arg_key>\n'
SHOWN += "<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n<arg_value>22</arg_value>\n"
MESSAGES: Any = [{"role": "user", "content": SHOWN}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Łódź"]}, "days": {"enum": [1, 22]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA, "strict": True}}
    for name in ("weather", "news")
]
GREEDY: Any = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 0}


@pytest.fixture(scope="module", params=["hermes", "pythonic", "glm45"])
def live(
    request: pytest.FixtureRequest, small_models: dict[str, Path], tmp_path_factory: Any
) -> Iterator[Live]:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text("{{ 'tools' if tools }}{% for m in messages %}{{ m.content }}{% endfor %}")
    fields = {"tool_call_parser": request.param, "chat_template": str(template)}
    with served(model=str(small_models["llama"]), **fields) as found:
        yield found


def options(live: Live) -> dict[str, Any]:
    """A random model likes whitespace, which JSON may hold: it is told not to."""
    space = live.engine.parts.tokenizer("\n\t\r ").input_ids
    bias = {str(token): -100 for token in space}
    return {"model": "small", "messages": MESSAGES, "tools": TOOLS, "logit_bias": bias}


def calls(live: Live, **fields: Any) -> list[tuple[str, Any]]:
    answer = live.client.chat.completions.create(**options(live), **fields)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    made = [call.function for call in choice.message.tool_calls or []]
    return [(one.name, json.loads(one.arguments)) for one in made]


def test_required_calls_follow_their_schemas(live: Live) -> None:
    for seed in range(2):
        ((name, arguments),) = calls(
            live, tool_choice="required", parallel_tool_calls=False, seed=seed
        )
        assert name in ("weather", "news")
        assert arguments["city"] in ("Paris", "Łódź")
        assert arguments["days"] in (1, 22)


def test_the_named_tool_is_called(live: Live) -> None:
    choice: Any = {"type": "function", "function": {"name": "news"}}
    ((name, _),) = calls(live, tool_choice=choice, seed=1)
    assert name == "news"


def test_drafts_change_no_call(live: Live) -> None:
    before = live.engine.stats().spec.num_accepted_tokens
    drafted = calls(live, **GREEDY)
    assert live.engine.stats().spec.num_accepted_tokens > before
    off = {"speculative": {"enabled": False}}
    assert calls(live, **GREEDY, extra_body=off) == drafted


def test_streamed_calls_are_the_same(live: Live) -> None:
    with live.client.chat.completions.stream(**options(live), **GREEDY) as stream:
        (choice,) = stream.get_final_completion().choices
    made = [call.function for call in choice.message.tool_calls or []]
    assert [(one.name, one.parsed_arguments) for one in made] == calls(live, **GREEDY)
