"""The openai client: chat, completions, tools, responses, and embeddings refused."""

from __future__ import annotations

import asyncio
import json
from typing import Literal

from checks import API, CITY, MODEL, QUESTION, passed
from openai import APIStatusError, AsyncOpenAI, OpenAI
from pydantic import BaseModel

client = OpenAI(base_url=API, api_key="none", max_retries=0)
MESSAGES = [{"role": "user", "content": QUESTION}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}}
FLAT = {"type": "function", "name": "weather", "parameters": CITY, "strict": True}
GREEDY = {"model": MODEL, "temperature": 0}


class City(BaseModel):
    city: Literal["Paris", "Rome"]


def chat() -> str:
    answer = client.chat.completions.create(**GREEDY, messages=MESSAGES, max_tokens=30)
    text = answer.choices[0].message.content
    stream = client.chat.completions.create(
        **GREEDY,
        messages=MESSAGES,
        max_tokens=30,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    pieces = [one.choices[0].delta.content or "" for one in chunks if one.choices]
    assert "".join(pieces) == text
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens == 30
    stop = {"max_tokens": 30, "stop": ["\n2"]}  # the helper refuses what is cut by its length
    with client.chat.completions.stream(**GREEDY, messages=MESSAGES, **stop) as events:
        final = events.get_final_completion()
    assert text.startswith(final.choices[0].message.content)
    passed("chat, whole and streamed")
    return text


def completions() -> None:
    fields = {**GREEDY, "prompt": "Once upon a time", "max_tokens": 20, "logprobs": 2}
    answer = client.completions.create(**fields, n=2, echo=True)
    assert all(one.text.startswith("Once upon a time") for one in answer.choices)
    stream = client.completions.create(**fields, stream=True)
    text = "".join(one.choices[0].text for one in stream)
    assert answer.choices[0].text == "Once upon a time" + text
    passed("completions, echoed and streamed")


def tools() -> None:
    fields = {**GREEDY, "messages": MESSAGES, "tools": [TOOL], "tool_choice": "required"}
    message = client.chat.completions.create(**fields, max_tokens=700).choices[0].message
    call = message.tool_calls[0]
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    history = [*MESSAGES, message, {"role": "tool", "tool_call_id": call.id, "content": "24"}]
    after = client.chat.completions.create(**GREEDY, messages=history, tools=[TOOL], max_tokens=20)
    assert after.choices[0].message.content
    passed("tools, with their results sent back")
    arguments, names = "", []
    for chunk in client.chat.completions.create(**fields, max_tokens=700, stream=True):
        for part in chunk.choices[0].delta.tool_calls or []:
            if part.index:
                continue
            names += [part.function.name] if part.function.name else []
            arguments += part.function.arguments or ""
    assert names == ["weather"]
    assert json.loads(arguments) == json.loads(call.function.arguments)
    passed("streamed tools")
    parsed = client.chat.completions.parse(
        **GREEDY, messages=MESSAGES, response_format=City, max_tokens=700
    )
    assert parsed.choices[0].message.parsed.city in ("Paris", "Rome")
    passed("structured output")


def responses(text: str) -> None:
    fields = {**GREEDY, "input": QUESTION, "max_output_tokens": 30}
    answer = client.responses.create(**fields)
    assert answer.output_text == text
    assert answer.status == "incomplete"
    kinds = [event.type for event in client.responses.create(**fields, stream=True)]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.incomplete"
    with client.responses.stream(**fields, extra_body={"stop": ["\n2"]}) as stream:
        assert text.startswith(stream.get_final_response().output_text)
    passed("responses, whole and streamed")
    history = [{"role": "user", "content": QUESTION}]
    called = client.responses.create(
        **GREEDY,
        input=history,
        tools=[FLAT],
        tool_choice="required",
        store=False,
        parallel_tool_calls=False,
    )
    call = next(one for one in called.output if one.type == "function_call")
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
    history += called.output
    history += [
        {"type": "function_call_output", "call_id": one.call_id, "output": "24"}
        for one in called.output
        if one.type == "function_call"
    ]
    last = client.responses.create(**GREEDY, input=history, tools=[FLAT], max_output_tokens=20)
    assert last.output_text
    assert client.responses.parse(
        **GREEDY, input=QUESTION, text_format=City
    ).output_parsed.city in ("Paris", "Rome")
    passed("responses with tools and structured output")


def refusals() -> None:
    for ask, status in [
        (lambda: client.embeddings.create(model=MODEL, input="x"), 501),
        (lambda: client.responses.create(model=MODEL, input="x", store=True), 400),
        (lambda: client.responses.create(model=MODEL, input="x", previous_response_id="y"), 400),
        (lambda: client.chat.completions.create(model="other", messages=MESSAGES), 404),
    ]:
        told = None
        try:
            ask()
        except APIStatusError as error:
            told = error
        assert told is not None
        assert told.status_code == status, told
        assert told.message
    passed("embeddings and stored responses refused")


async def at_once() -> None:
    async with AsyncOpenAI(base_url=API, api_key="none") as many:
        asked = [
            many.chat.completions.create(**GREEDY, messages=MESSAGES, max_tokens=20)
            for _ in range(16)
        ]
        texts = {one.choices[0].message.content for one in await asyncio.gather(*asked)}
    assert len(texts) == 1
    passed("16 at once")


assert client.models.list().data[0].id == MODEL
said = chat()
completions()
tools()
responses(said)
refusals()
asyncio.run(at_once())
