"""Chat completions through the real openai client."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import OpenAI

MESSAGES: Any = [{"role": "user", "content": "say hi"}]
TEXT = "Hi, é😀 there"
NUM_TOKENS = len(TEXT.encode()) + 1  # EOS counts


def test_whole_answer(openai_client: OpenAI, engine: Any) -> None:
    answer = openai_client.chat.completions.create(model="fake", messages=MESSAGES)
    (choice,) = answer.choices
    assert choice.message.content == TEXT
    assert (choice.message.role, choice.finish_reason, choice.index) == ("assistant", "stop", 0)
    assert choice.logprobs is None
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.model == "fake"
    assert answer.system_fingerprint is not None
    assert engine.prompts == ["user: say hi\nassistant:"]
    assert engine.aborted == []


def test_usage_and_metrics(openai_client: OpenAI, engine: Any) -> None:
    answer = openai_client.chat.completions.create(model="fake", messages=MESSAGES, n=2)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(engine.prompts[0])
    assert answer.usage.completion_tokens == NUM_TOKENS * 2 + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + NUM_TOKENS * 2 + 1
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 5
    extra = answer.model_extra
    assert extra is not None
    spec = extra["metrics"]["speculative_decoding"]
    rounds = spec["num_spec_steps"]
    accepted = NUM_TOKENS * 2 + 1 - rounds
    assert sum(spec["acceptance_histogram"]) == rounds
    assert sum(k * count for k, count in enumerate(spec["acceptance_histogram"])) == accepted
    assert spec["num_accepted_draft_tokens"] == accepted
    assert spec["num_draft_tokens"] == 4 * rounds
    assert spec["mean_acceptance_length"] == pytest.approx(1 + accepted / rounds, abs=1e-4)
    assert sum(spec["depth_histogram"]) == rounds
    assert [k for k, count in enumerate(spec["depth_histogram"]) if count] == [4, 6]
    assert spec["depth"].keys() == {"num_steps", "num_nodes", "reason", "expected_gain"}
    assert spec["depth"]["reason"].startswith(f"batch 2: K={spec['depth']['num_steps']}")
    assert spec["draft_acceptance_rate"] == pytest.approx(accepted / (4 * rounds), abs=1e-4)


def test_stream(openai_client: OpenAI, engine: Any) -> None:
    stream = openai_client.chat.completions.create(model="fake", messages=MESSAGES, stream=True)
    chunks = list(stream)
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    assert [delta.role for delta in deltas[1:]] == [None] * (len(deltas) - 1)
    assert "".join(delta.content or "" for delta in deltas) == TEXT
    assert not any("\ufffd" in (delta.content or "") for delta in deltas)
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert all(chunk.usage is None for chunk in chunks)
    has_metrics = [bool((chunk.model_extra or {}).get("metrics")) for chunk in chunks]
    assert has_metrics == [False] * (len(chunks) - 1) + [True]


def test_stream_with_usage(openai_client: OpenAI, engine: Any) -> None:
    stream = openai_client.chat.completions.create(
        model="fake", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == NUM_TOKENS
    assert last.model_extra is not None
    spec = last.model_extra["metrics"]["speculative_decoding"]
    assert sum(spec["depth_histogram"]) == spec["num_spec_steps"] > 0
    assert all(chunk.usage is None and "usage" in chunk.model_fields_set for chunk in chunks)


def test_choices_of_a_stream(openai_client: OpenAI, engine: Any) -> None:
    stream = openai_client.chat.completions.create(
        model="fake", messages=MESSAGES, stream=True, n=2
    )
    texts, roles, reasons = ["", ""], [0, 0], [0, 0]
    for chunk in stream:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        roles[choice.index] += choice.delta.role is not None
        reasons[choice.index] += choice.finish_reason is not None
    assert texts == [TEXT, TEXT + "!"]
    assert roles == reasons == [1, 1]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(openai_client: OpenAI, engine: Any, stream: bool) -> None:
    engine.script = "aé"
    options: Any = {"stream": stream}
    got: Any = openai_client.chat.completions.create(
        model="fake", messages=MESSAGES, logprobs=True, top_logprobs=2, **options
    )
    parts = list(got) if stream else [got]
    content = [
        entry
        for part in parts
        if part.choices[0].logprobs
        for entry in part.choices[0].logprobs.content
    ]
    first, *rest = content
    token = engine.tokenizer.convert_tokens_to_ids("a")
    assert (first.token, first.bytes, first.logprob) == ("a", [97], -token / 100)
    assert [top.token for top in first.top_logprobs] == ["a", "b"]
    assert [entry.bytes for entry in rest] == [[0xC3], [0xA9]]  # and no EOS


def test_stop_strings_and_text(openai_client: OpenAI, engine: Any) -> None:
    answer = openai_client.chat.completions.create(model="fake", messages=MESSAGES, stop=" th")
    assert answer.choices[0].message.content == "Hi, é😀"
    assert answer.choices[0].finish_reason == "stop"
    assert engine.samplings[0].stop == (" th",)


def test_length(openai_client: OpenAI, engine: Any) -> None:
    answer = openai_client.chat.completions.create(
        model="fake", messages=MESSAGES, max_completion_tokens=2
    )
    assert answer.choices[0].message.content == "Hi"
    assert answer.choices[0].finish_reason == "length"


def test_every_parameter_arrives(openai_client: OpenAI, engine: Any) -> None:
    beyond = {
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "stop_token_ids": [7, 8],
        "include_stop_str_in_output": True,
        "min_tokens": 2,
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    openai_client.chat.completions.create(
        model="fake",
        messages=MESSAGES,
        temperature=0.5,
        top_p=0.9,
        frequency_penalty=0.1,
        presence_penalty=-0.1,
        logit_bias={"12": 3},
        seed=11,
        stop=["x", "y"],
        max_tokens=9,
        n=2,
        logprobs=True,
        top_logprobs=3,
        extra_body=beyond,
    )
    (sampling,) = engine.samplings
    for name, value in beyond.items():
        assert getattr(sampling, name) == (tuple(value) if isinstance(value, list) else value)
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.5, 0.9, 11)
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.1, -0.1)
    assert (sampling.logit_bias, sampling.stop) == ({12: 3.0}, ("x", "y"))
    assert (sampling.max_tokens, sampling.n, sampling.logprobs) == (9, 2, 3)


def test_defaults(openai_client: OpenAI, engine: Any) -> None:
    openai_client.chat.completions.create(
        model="fake", messages=MESSAGES, temperature=None, user="me", store=False
    )
    (sampling,) = engine.samplings
    assert (sampling.temperature, sampling.max_tokens, sampling.n) == (1.0, None, 1)


def test_messages_reach_the_template(openai_client: OpenAI, engine: Any) -> None:
    messages: Any = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "name": "ann", "content": [{"type": "text", "text": t} for t in "ab"]},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None},
    ]
    openai_client.chat.completions.create(model="fake", messages=messages)
    assert engine.prompts == ["system: be brief\nuser(ann): a\nb\nassistant: c\nassistant:"]


def test_an_answer_can_be_sent_back(openai_client: OpenAI, engine: Any) -> None:
    answer = openai_client.chat.completions.create(model="fake", messages=MESSAGES)
    again: Any = [*MESSAGES, answer.choices[0].message.model_dump()]
    openai_client.chat.completions.create(model="fake", messages=again)
    assert engine.prompts[1] == f"user: say hi\nassistant: {TEXT}\nassistant:"


def test_a_model_without_a_template(openai_client: OpenAI, engine: Any) -> None:
    engine.tokenizer.chat_template = None
    with pytest.raises(openai.BadRequestError, match="no chat template") as caught:
        openai_client.chat.completions.create(model="fake", messages=MESSAGES)
    assert caught.value.param == "messages"
