"""What open-webui 0.12.4 sends: bodies as its routers/openai.py and routers/tasks.py make them.

The program itself is not installed: it brings torch and a database.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
from checks import API, CITY, MODEL, QUESTION, passed

HEADERS = {"Authorization": "Bearer none", "Content-Type": "application/json"}
http = httpx.Client(base_url=API, headers=HEADERS, timeout=120)
SYSTEM = {"role": "system", "content": "Answer briefly."}
USER = {"role": "user", "content": QUESTION}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather.", "parameters": CITY},
}


def ask(path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with http.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    return [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]


def text_of(chunks: list[dict[str, Any]]) -> str:
    deltas = [one["choices"][0]["delta"] for one in chunks if one["choices"]]
    return "".join(one.get("content") or "" for one in deltas)


assert MODEL in [one["id"] for one in http.get("/models").json()["data"]]
passed("the list of models")

usage = {"stream_options": {"include_usage": True}}
first = stream(
    "/chat/completions",
    {"model": MODEL, "stream": True, "messages": [SYSTEM, USER], "max_tokens": 40, **usage},
)
assert 0 < first[-1]["usage"]["completion_tokens"] <= 40
history = [SYSTEM, USER, {"role": "assistant", "content": text_of(first)}]
history.append({"role": "user", "content": [{"type": "text", "text": "And one more?"}]})
params = {
    "temperature": 0.7,
    "top_p": 0.9,
    "min_p": 0.05,
    "top_k": 40,
    "frequency_penalty": 0.1,
    "presence_penalty": 0.1,
    "seed": 1,
    "stop": ["<end>"],
    "logit_bias": {"100": -5},
    "response_format": {"type": "text"},
}
body = {"model": MODEL, "stream": True, "messages": history, "max_tokens": 20, **params}
assert text_of(stream("/chat/completions", body))
passed("chats with a history and all parameters of its panel")

one_call = {"tool_choice": "required", "parallel_tool_calls": False}  # the small model goes on
calling = {"model": MODEL, "messages": [SYSTEM, USER], "tools": [TOOL]}
chunks = stream("/chat/completions", {**calling, **one_call, "stream": True})
calls: list[dict[str, Any]] = []
for chunk in chunks:
    for part in chunk["choices"][0]["delta"].get("tool_calls", []) if chunk["choices"] else []:
        if part["index"] == len(calls):
            calls.append({"index": part["index"], **part, "function": dict(part["function"])})
        else:
            calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
assert json.loads(calls[0]["function"]["arguments"])["city"] in ("Paris", "Rome")
results = [{"role": "tool", "tool_call_id": one["id"], "content": "24 degrees"} for one in calls]
told = [SYSTEM, USER, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
body = {"model": MODEL, "stream": True, "messages": told, "tools": [TOOL], "max_tokens": 20}
assert stream("/chat/completions", body)
passed("native function calling")

for task in ("Give a title", "Give tags", "Give follow-up questions"):
    prompt = [{"role": "user", "content": f"### Task:\n{task} as JSON.\n{QUESTION}"}]
    answer = ask(
        "/chat/completions",
        {"model": MODEL, "messages": prompt, "stream": False, "max_tokens": 30},
    )
    assert answer["choices"][0]["message"]["content"] is not None
passed("tasks: title, tags, follow-ups")

items = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]}]
body = {"model": MODEL, "stream": True, "input": items, "instructions": "Answer briefly."}
flat = {"type": "function", **TOOL["function"]}
events = stream("/responses", {**body, "max_output_tokens": 30, "tools": [flat]})
assert events[-1]["type"] in ("response.completed", "response.incomplete")
passed("its responses mode")

answer = http.post("/embeddings", json={"model": MODEL, "input": ["x"]})
assert answer.status_code == 501
passed("embeddings refused")
