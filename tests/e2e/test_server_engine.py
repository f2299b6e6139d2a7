"""The real openai client against the real server and engine, on a small random model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, OpenAI

from specengine import LLM, SamplingParams, SpecConfig
from specengine.engine.loop import Engine
from tests.support.live_server import live_server
from tests.support.waiting import until

PROMPT = "abcabcabcabcabc"
SPEC = SpecConfig(algorithm="NGRAM", adaptive=False, num_draft_tokens=6, ngram_min_match=1)
FLAGS: dict[str, Any] = {
    "dtype": "float32",
    "max_total_tokens": 2048,
    "served_model_name": "small",
    "page_size": 16,
}


@dataclass
class Live:
    url: str
    engine: Engine
    client: OpenAI

    def wait_until_idle(self) -> None:
        until(lambda: not self.engine.has_work)


@contextmanager
def served(**flags: Any) -> Iterator[Live]:
    with (
        live_server({**FLAGS, **flags}, SPEC) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield Live(server.url, server.engine, client)


@pytest.fixture(scope="module")
def live(small_models: dict[str, Path]) -> Iterator[Live]:
    with served(model=str(small_models["llama"])) as found:
        yield found


@pytest.fixture(scope="module")
def expected(small_models: dict[str, Path]) -> str:
    """What plain decoding offline says to PROMPT."""
    llm = LLM(str(small_models["llama"]), **FLAGS)
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    return llm.generate([PROMPT], params)[0].text


def complete(live: Live, **more: Any) -> Any:
    options = {"model": "small", "prompt": PROMPT, "max_tokens": 30, "temperature": 0}
    return live.client.completions.create(**{**options, "extra_body": {"ignore_eos": True}, **more})


def test_completion_equals_plain_decoding(live: Live, expected: str) -> None:
    answer = complete(live)
    assert answer.choices[0].text == expected
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 30
    spec = answer.metrics["speculative_decoding"]
    assert spec["num_accepted_draft_tokens"] > 0
    assert 1 + spec["num_spec_steps"] + spec["num_accepted_draft_tokens"] == 30
    assert spec["depth_histogram"] == [0] * 5 + [spec["num_spec_steps"]]
    reason = "K=5, fixed by --no-speculative-adaptive"
    fields = {"num_steps": 5, "num_nodes": None, "reason": reason, "expected_gain": None}
    assert spec["depth"] == fields


def test_streaming_adds_up_to_the_same_text(live: Live, expected: str) -> None:
    stream = complete(live, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks if c.choices) == expected
    assert chunks[-1].usage.completion_tokens == 30


def test_chat(live: Live) -> None:
    answer = live.client.chat.completions.create(
        model="small",
        messages=[{"role": "user", "content": "abcabc"}],
        max_tokens=5,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        n=2,
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].message.content == answer.choices[1].message.content
    assert answer.choices[0].logprobs is not None
    entries = answer.choices[0].logprobs.content or []
    assert len(entries) <= 5
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in entries)


def test_logprobs_do_not_depend_on_speculation(live: Live, small_models: dict[str, Path]) -> None:
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, logprobs=0)
    plain = LLM(str(small_models["llama"]), **FLAGS).generate([PROMPT], params)[0]
    expected = [entry.logprob for entry in plain.completions[0].logprobs]
    found = complete(live, logprobs=0).choices[0].logprobs.token_logprobs
    assert found == pytest.approx(expected, abs=1e-4)


def test_a_client_that_leaves_frees_its_memory(live: Live) -> None:
    async def leave() -> None:
        async with AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none") as client:
            stream = await client.completions.create(
                model="small",
                prompt="0123456789",
                max_tokens=400,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            async for _ in stream:
                break
            await stream.close()

    asyncio.run(leave())
    live.wait_until_idle()
    live.engine.scheduler.check_invariant()
    stats = live.engine.stats()
    assert stats.num_free_slots == stats.num_slots
    assert complete(live).choices[0].text


def test_many_at_once(live: Live, expected: str) -> None:
    async def ask() -> list[str]:
        async with AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none") as client:
            calls = [
                client.completions.create(
                    model="small",
                    prompt=PROMPT,
                    max_tokens=30,
                    temperature=0,
                    extra_body={"ignore_eos": True},
                )
                for _ in range(12)
            ]
            answers = await asyncio.gather(*calls)
        return [answer.choices[0].text for answer in answers]

    assert asyncio.run(ask()) == [expected] * 12


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "x" * 600}, "prompt"),
        ({"temperature": -1}, "temperature"),
        ({"n": 0}, "n"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"no_such_field": 1}, "no_such_field"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_requests_are_refused_by_name(live: Live, body: dict[str, Any], param: str) -> None:
    answer = httpx.post(
        f"{live.url}/v1/completions", json={"model": "small", "prompt": "x", **body}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert complete(live, max_tokens=1).choices


def test_huge_max_tokens_end_at_the_context(live: Live) -> None:
    answer = complete(live, max_tokens=10**9, stop=None)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == 512


def test_metrics_count_what_ran(live: Live) -> None:
    def accepted() -> float:
        text = httpx.get(f"{live.url}/metrics").text
        name = "specengine:spec_decode_num_accepted_tokens_total"
        (line,) = [one for one in text.splitlines() if one.startswith(name)]
        return float(line.split()[-1])

    before = accepted()
    gained = complete(live).metrics["speculative_decoding"]["num_accepted_draft_tokens"]
    assert accepted() - before == gained


@pytest.mark.parametrize(("control", "most"), [({"enabled": False}, 0), ({"num_steps": 1}, 1)])
def test_a_request_limits_its_own_drafts(
    live: Live, expected: str, control: dict[str, Any], most: int
) -> None:
    answer = complete(live, extra_body={"ignore_eos": True, "speculative": control})
    assert answer.choices[0].text == expected
    spec = answer.metrics["speculative_decoding"]
    assert (spec["num_draft_tokens"] > 0) == (most > 0)
    assert spec["num_accepted_draft_tokens"] <= most * spec["num_spec_steps"]
