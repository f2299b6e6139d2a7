"""Answers to the bodies of the protocol's table, such that they can be compared."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.protocol.table import Case, cases

AT_ONCE = 32  # requests
TEMPLATE = """{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}Well. {% endif %}{% endif %}"""
# What no two answers share, and what drafts change.
VOLATILE = {
    *("id", "created", "created_at", "completed_at", "metrics", "item_id", "call_id"),
    *("e2e_latency", "cached_tokens", "system_fingerprint"),
}
Answers = dict[str, Any]


def flags_of(folder: Path) -> dict[str, Any]:
    """Flags of a server that takes every body. folder: its chat template goes there."""
    template = folder / "chat.jinja"
    template.write_text(TEMPLATE)
    return {
        "model": "tiny",
        "dtype": "float32",
        "max_total_tokens": 8192,
        "chat_template": str(template),
        "tool_call_parser": "hermes",
    }


async def ask(
    url: str, given: Sequence[Case] | None = None, changed: dict[str, Any] | None = None
) -> Answers:
    """The answers by name. given: the cases; by default all. changed: fields of every body."""
    asked = [*cases()] if given is None else given
    turn = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:

        async def one(case: Case) -> Any:
            async with turn:
                return await answer_to(http, case.path, case.body | (changed or {}))

        found = await asyncio.gather(*map(one, asked))
    return {case.name: answer for case, answer in zip(asked, found, strict=True)}


async def answer_to(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, f"{path} {body}: {answer.text}"
    return joined(answer.text) if body.get("stream") else answer.json()


def joined(text: str) -> Any:
    """A stream as one answer: how it was cut into events depends on the rounds."""
    lines = [one.partition("data: ")[2] for one in text.split("\n") if "data: " in one]
    events = [json.loads(one) for one in lines if one != "[DONE]"]
    last = events[-1]
    if "meta_info" in last:  # each event of a choice holds all of it so far
        whole = {one.get("index", 0): one for one in events}
        return [whole[place] for place in sorted(whole)] if "index" in last else last
    if "response" in last:
        return last["response"]
    pieces = [choice for one in events for choice in one["choices"]]
    texts = [one["text"] if "text" in one else one["delta"].get("content", "") for one in pieces]
    ends = [one["finish_reason"] for one in pieces if one["finish_reason"]]
    (metrics,) = [one["metrics"] for one in events if "metrics" in one]
    return {"text": "".join(texts), "ends": ends, "usage": last.get("usage"), "metrics": metrics}


def settled(value: Any) -> Any:
    """Without what is volatile."""
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if k not in VOLATILE and not k.startswith("spec_")}
        return {name: settled(one) for name, one in kept.items()}
    return [settled(one) for one in value] if isinstance(value, list) else value


def assert_same(one: Any, other: Any, place: str) -> None:
    """Numbers may differ in their last digits: a batch of several rows is summed otherwise."""
    if isinstance(one, float) and isinstance(other, float):
        assert one == pytest.approx(other, abs=2e-3), place
    elif isinstance(one, dict) and isinstance(other, dict):
        assert one.keys() == other.keys(), place
        for name in one:
            assert_same(one[name], other[name], f"{place}.{name}")
    elif isinstance(one, list) and isinstance(other, list):
        assert len(one) == len(other), place
        for number, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{place}[{number}]")
    else:
        assert one == other, place


def num_accepted(answer: Any) -> int:
    if isinstance(answer, list):
        return sum(map(num_accepted, answer))
    if "meta_info" in answer:
        return int(answer["meta_info"]["spec_accept_token_num"])
    return int(answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"])


def assert_drafts_change_nothing(plain: Answers, drafted: Answers) -> None:
    """And a request limits its drafts: `speculative` is honoured."""
    for name, answer in drafted.items():
        assert_same(settled(plain[name]), settled(answer), name)
        assert num_accepted(plain[name]) == 0, name
        assert num_accepted(answer) > 0, name
    limited = drafted["speculative /v1/completions"]["metrics"]["speculative_decoding"]
    free = drafted["model /v1/completions"]["metrics"]["speculative_decoding"]
    assert limited["num_accepted_draft_tokens"] <= limited["num_spec_steps"]
    assert free["num_accepted_draft_tokens"] > free["num_spec_steps"]
