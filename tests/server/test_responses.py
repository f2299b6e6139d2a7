"""/v1/responses through the real openai client; a script stands in for the model."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import OpenAI

from specengine.core.errors import EngineStoppedError
from tests.server.test_tools import ANSWER, SCHEMA, TEMPLATE, call

PATH = "/v1/responses"
TEXT = "Hi, é😀 there"


def tool(name: str, **fields: Any) -> Any:
    return {"type": "function", "name": name, "parameters": SCHEMA, "strict": False, **fields}


TOOLS = [tool("weather", description="how it is"), tool("time")]


@pytest.fixture
def model(engine: Any) -> Any:
    """An engine whose model reasons and calls tools as Qwen3 does."""
    engine.tokenizer.chat_template = TEMPLATE
    engine.context_length = 4000
    engine.script = ANSWER
    return engine


def test_whole_answer(openai_client: OpenAI, engine: Any) -> None:
    answer = openai_client.responses.create(
        model="fake", input="hi", instructions="Be kind.", metadata={"a": "b"}
    )
    assert answer.output_text == TEXT
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    assert answer.id.startswith("resp_")
    assert engine.prompts == ["system: Be kind.\nuser: hi\nassistant:"]
    assert answer.metadata == {"a": "b"}
    assert answer.instructions == "Be kind."
    assert answer.usage is not None
    assert answer.usage.input_tokens == len("system: Be kind.\nuser: hi\nassistant:")
    assert answer.usage.input_tokens_details.cached_tokens == 5
    assert answer.usage.output_tokens == len(TEXT.encode()) + 1
    extra: Any = answer.model_extra
    assert extra["store"] is False
    assert extra["metrics"]["speculative_decoding"]["num_spec_steps"] > 0


def test_answer_that_is_cut(openai_client: OpenAI, engine: Any) -> None:
    answer = openai_client.responses.create(model="fake", input="hi", max_output_tokens=3)
    assert (answer.status, answer.output_text) == ("incomplete", "Hi,")
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete"  # type: ignore[union-attr]


def test_reasoning_and_calls_are_items(openai_client: OpenAI, model: Any) -> None:
    answer = openai_client.responses.create(model="fake", input="hi", tools=TOOLS)
    assert [one.type for one in answer.output] == [
        *("reasoning", "message", "function_call", "function_call")
    ]
    reasoning, _, weather, time = [one.to_dict() for one in answer.output]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert reasoning["summary"] == []
    assert answer.output_text == "I look."
    assert (weather["name"], json.loads(str(weather["arguments"]))) == (
        "weather",
        {"city": "Gdańsk"},
    )
    assert weather["call_id"] != time["call_id"]
    assert answer.usage is not None
    assert answer.usage.output_tokens_details.reasoning_tokens == 3
    assert next(one.to_dict() for one in answer.tools)["name"] == "weather"


def test_an_answer_goes_back_as_input(openai_client: OpenAI, model: Any) -> None:
    first = openai_client.responses.create(model="fake", input="hi", tools=TOOLS)
    history: Any = [{"role": "user", "content": "hi"}]
    history += [one.to_dict() for one in first.output]
    for one in first.output:
        if one.type == "function_call":
            output = {"type": "function_call_output", "call_id": one.call_id, "output": "24"}
            history.append(output)
    model.script = "Warm."
    second = openai_client.responses.create(model="fake", input=history, tools=TOOLS)
    assert second.output_text == "Warm."
    _, _, prompt = model.prompts[-1].partition("<user>")
    ids = [one.call_id for one in first.output if one.type == "function_call"]
    calls = "".join(
        f"<tool_call>{id} {name} {json.dumps({'city': city}, ensure_ascii=False)}"
        for id, name, city in zip(ids, ("weather", "time"), ("Gdańsk", "Łódź 😀"), strict=True)
    )
    outputs = "".join(f"<tool {id}>24" for id in ids)
    assert prompt.replace("\\u0144", "ń") == f"hi<assistant>Hm.I look.{calls}{outputs}"


def events(client: OpenAI, **fields: Any) -> list[Any]:
    stream = client.responses.create(model="fake", input="hi", stream=True, **fields)
    return list(stream)


def test_events_come_with_openais_names_and_order(openai_client: OpenAI, model: Any) -> None:
    found = events(openai_client, tools=TOOLS)
    assert [one.sequence_number for one in found] == list(range(len(found)))
    kinds: list[str] = []
    for one in found:
        kind = one.type.removeprefix("response.")
        if not (kind.endswith(".delta") and kinds[-1:] == [kind]):
            kinds.append(kind)
    opened, part = "output_item.added", "content_part"
    reasoning = ["reasoning_text.delta", "reasoning_text.done"]
    text = ["output_text.delta", "output_text.done"]
    arguments = [f"function_call_arguments.{end}" for end in ("delta", "done")]
    assert kinds == [
        *("created", "in_progress"),
        *(opened, f"{part}.added", *reasoning, f"{part}.done", "output_item.done"),
        *(opened, f"{part}.added", *text, f"{part}.done", "output_item.done"),
        *(opened, *arguments, "output_item.done"),
        *(opened, *arguments, "output_item.done"),
        "completed",
    ]


def test_events_add_up_to_the_whole_answer(openai_client: OpenAI, model: Any) -> None:
    found = events(openai_client, tools=TOOLS)
    final = found[-1].response
    whole = openai_client.responses.create(model="fake", input="hi", tools=TOOLS)
    assert without_ids(final.output) == without_ids(whole.output)
    texts: dict[tuple[int, str], str] = {}
    for one in found:
        if one.type.endswith(".delta"):
            key = (one.output_index, one.type)
            texts[key] = texts.get(key, "") + one.delta
    items = [one.to_dict() for one in final.output]
    assert [*texts.values()] == [
        *(items[k]["content"][0]["text"] for k in (0, 1)),
        *(items[k]["arguments"] for k in (2, 3)),
    ]
    done = [one.item.to_dict() for one in found if one.type == "response.output_item.done"]
    assert done == items


def without_ids(items: Any) -> list[Any]:
    dumped = [one.to_dict() for one in items]
    return [{k: v for k, v in one.items() if k not in ("id", "call_id")} for one in dumped]


def test_the_stream_ends_without_a_mark(site: Any, engine: Any) -> None:
    text = site.post(PATH, model="fake", input="hi", stream=True).text
    assert "[DONE]" not in text
    blocks = text.strip().split("\n\n")
    for block in blocks:
        first, second = block.split("\n")
        assert json.loads(second.removeprefix("data: "))["type"] == first.removeprefix("event: ")


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_the_text(openai_client: OpenAI, engine: Any, stream: bool) -> None:
    fields: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    if stream:
        found = events(openai_client, **fields)
        deltas = [one for one in found if one.type == "response.output_text.delta"]
        answer = found[-1].response
        streamed = [one.token for delta in deltas for one in delta.logprobs]
    else:
        answer = openai_client.responses.create(model="fake", input="hi", **fields)
        streamed = None
    entries = answer.output[0].content[0].logprobs
    assert len(entries) == len(TEXT.encode())
    assert [bytes(one.bytes) for one in entries] == [bytes([b]) for b in TEXT.encode()]
    assert len(entries[0].top_logprobs) == 2
    assert streamed in (None, [one.token for one in entries])


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_beside_reasoning_are_those_of_the_text(
    openai_client: OpenAI, model: Any, stream: bool
) -> None:
    model.script = "<think>\nHm.\n</think>\n\nSo it is."
    fields: Any = {"include": ["message.output_text.logprobs"]}
    if stream:
        answer = events(openai_client, **fields)[-1].response
    else:
        answer = openai_client.responses.create(model="fake", input="hi", **fields)
    text = "".join(one.token for one in answer.output[1].content[0].logprobs)
    assert text.endswith("So it is.")
    assert "Hm." not in text


def test_structured_output(openai_client: OpenAI, engine: Any) -> None:
    pytest.importorskip("llguidance")
    format: Any = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
    answer = openai_client.responses.create(model="fake", input="hi", text={"format": format})
    grammar = engine.samplings[-1].grammar
    assert (grammar.kind, json.loads(grammar.text)) == ("json_schema", SCHEMA)
    assert grammar.param == "text.format"
    assert answer.text is not None
    assert answer.text.to_dict()["format"] == format


def test_named_tool(openai_client: OpenAI, model: Any) -> None:
    pytest.importorskip("llguidance")
    model.script = call("time", "x")
    choice: Any = {"type": "function", "name": "time"}
    answer = openai_client.responses.create(
        model="fake", input="hi", tools=TOOLS, tool_choice=choice
    )
    assert [one.type for one in answer.output] == ["function_call"]
    assert answer.tool_choice.to_dict() == choice  # type: ignore[union-attr]


def test_an_error_after_the_first_event_is_told_as_a_failure(site: Any, engine: Any) -> None:
    engine.error, engine.error_after = EngineStoppedError("the engine has stopped"), 2
    text = site.post(PATH, model="fake", input="hi", stream=True).text
    last = json.loads(text.strip().split("\n\n")[-1].split("data: ")[1])
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {
        "code": "server_error",
        "message": "the engine has stopped",
    }


def test_an_error_before_it_is_one_of_http(site: Any, engine: Any) -> None:
    engine.error = EngineStoppedError("the engine has stopped")
    assert site.refusal(PATH, 503, model="fake", input="hi", stream=True)["code"] == "stopped"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [tool("a b")]}, "tools[0].name"),
        ({"tools": [tool("a"), tool("a")]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ({"reasoning": {"effort": "vast"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "detailed"}}, "summary"),
        ({"text": {"verbosity": "low"}}, "verbosity"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 1}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"input": []}, "input"),
        ({"input": ""}, None),
        ({"input": [1]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": "x", "mood": 1}]}, "input[0].mood"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"input": [{"type": "function_call", "name": "x", "arguments": ""}]}, "input[0].call_id"),
        ({"input": "x" * 300}, "input"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_not_served_is_refused_by_name(
    site: Any, engine: Any, fields: dict[str, Any], param: str | None
) -> None:
    body = {"model": "fake", "input": "hi"} | fields
    if param is None:
        assert site.post(PATH, **body).status_code == 200
        return
    error = site.refusal(PATH, 400, **body)
    assert error["param"] == param
    assert param.rpartition(".")[2].partition("[")[0] in error["message"] or "input" in param


def test_limit_that_does_not_fit_has_the_name_of_this_endpoint(site: Any, engine: Any) -> None:
    error = site.refusal(PATH, 400, model="fake", input="hi", min_tokens=20, max_output_tokens=3)
    assert "max_output_tokens (3)" in error["message"]


def test_store_may_be_false(site: Any, engine: Any) -> None:
    include = ["reasoning.encrypted_content"]
    body = {"model": "fake", "input": "hi", "store": False, "include": include}
    assert site.post(PATH, **body).json()["store"] is False


@pytest.mark.parametrize("stream", [False, True])
def test_fields_that_come_back_may_hold_any_json(site: Any, stream: bool) -> None:
    metadata = rb'{"whole": 99999999999999999999, "text": "\ud800", "no number": NaN, "list": [1]}'
    body = b'{"model": "fake", "input": "x", "max_output_tokens": 18446744073709551616, "stream": '
    body += (b"true" if stream else b"false") + b', "metadata": ' + metadata + b"}"
    answer = site.http.post("/v1/responses", content=body, headers=JSON)
    assert answer.status_code == 200
    lines = [one[6:] for one in answer.text.split("\n") if one.startswith("data: ")]
    found = json.loads(lines[-1])["response"] if stream else answer.json()
    whole = {"whole": 99999999999999999999, "text": "\ud800", "no number": None, "list": [1]}
    assert found["metadata"] == whole
    assert found["max_output_tokens"] == 2**64


def test_field_that_is_no_text_is_refused(site: Any) -> None:
    body = rb'{"model": "fake", "input": "x", "\ud800": 1}'
    answer = site.http.post("/v1/responses", content=body, headers=JSON)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


JSON = {"Content-Type": "application/json"}
