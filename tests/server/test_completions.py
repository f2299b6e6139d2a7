"""Text completions through the real openai client."""

from __future__ import annotations

from typing import Any

import pytest
from openai import OpenAI

TEXT = "Hi, é😀 there"


def test_whole_answer(openai_client: OpenAI, engine: Any) -> None:
    answer = openai_client.completions.create(model="fake", prompt="one", max_tokens=50)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == (TEXT, "stop", None)
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3
    assert engine.prompts == ["one"]


def test_default_length_is_that_of_openai(openai_client: OpenAI, engine: Any) -> None:
    openai_client.completions.create(model="fake", prompt="one")
    assert engine.samplings[0].max_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "seen"),
    [
        ("one", ["one"]),
        (["one", "two"], ["one", "two"]),
        ([64, 65], ["ab"]),
        ([[64], [65, 66]], ["a", "bc"]),
    ],
)
def test_forms_of_a_prompt(
    openai_client: OpenAI, engine: Any, prompt: Any, seen: list[str]
) -> None:
    engine.script = "x"
    answer = openai_client.completions.create(model="fake", prompt=prompt, n=2)
    assert sorted(engine.prompts) == sorted(seen)
    assert [choice.index for choice in answer.choices] == list(range(2 * len(seen)))
    assert [choice.text for choice in answer.choices] == ["x", "x!"] * len(seen)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len("".join(seen))
    assert answer.usage.completion_tokens == 5 * len(seen)


def test_stream_of_several_prompts(lenient_client: OpenAI, engine: Any) -> None:
    stream = lenient_client.completions.create(
        model="fake",
        prompt=["one", "two"],
        stream=True,
        max_tokens=50,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    texts = ["", ""]
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [TEXT, TEXT]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.prompt_tokens == 6


def test_stream_finishes_once(lenient_client: OpenAI, engine: Any) -> None:
    stream = lenient_client.completions.create(model="fake", prompt="one", stream=True)
    reasons = [chunk.choices[0].finish_reason for chunk in stream]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs(lenient_client: OpenAI, engine: Any, stream: bool) -> None:
    engine.script = "éb"
    options: Any = {"stream": stream}
    got: Any = lenient_client.completions.create(
        model="fake", prompt="ab", echo=True, logprobs=2, **options
    )
    parts = list(got) if stream else [got]
    assert "".join(part.choices[0].text for part in parts) == "abéb"
    logprobs = [part.choices[0].logprobs for part in parts if part.choices[0].logprobs]
    joined: dict[str, list[Any]] = {
        name: [item for one in logprobs for item in getattr(one, name)]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    }
    assert joined["tokens"] == ["a", "b", "bytes:\\xc3", "bytes:\\xa9", "b", "<eos>"]
    assert joined["text_offset"] == [0, 1, 2, 2, 3, 4]
    assert joined["token_logprobs"][0] is joined["top_logprobs"][0] is None
    assert set(joined["top_logprobs"][1]) == {"b", "c"}
    assert engine.samplings[0].prompt_logprobs == 2


def test_echo_of_token_ids(openai_client: OpenAI, engine: Any) -> None:
    answer = openai_client.completions.create(
        model="fake", prompt=[64, 256, 65], echo=True, max_tokens=2
    )
    assert answer.choices[0].text == "abHi"
    assert engine.samplings[0].prompt_logprobs is None


def test_logprobs_of_the_chosen_token_only(openai_client: OpenAI, engine: Any) -> None:
    answer = openai_client.completions.create(model="fake", prompt="a", logprobs=0, max_tokens=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["H", "i"]
    assert [list(top) for top in logprobs.top_logprobs or []] == [["H"], ["i"]]
