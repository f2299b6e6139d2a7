"""What the engine hands out, to those who stream and to those who do not."""

from __future__ import annotations

from typing import Any

import pytest

from specengine import LLM, SamplingParams, SpecConfig
from specengine.engine.outputs import RequestOutput

PROMPTS = [[1, 2, 3, 4, 1, 2, 3, 4], [7, 8, 9]]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(
        "tiny",
        SpecConfig(algorithm="EAGLE3", num_steps=3, adaptive=False),
        dtype="float32",
        max_total_tokens=4096,
    )


def outputs(llm: LLM, params: SamplingParams, stream: bool) -> list[RequestOutput]:
    for number, prompt in enumerate(PROMPTS):
        llm.engine.add_request(str(number), prompt, params, stream)
    found = []
    while llm.engine.has_work:
        found += llm.engine.step()
    return found


@pytest.mark.parametrize("more", [{}, {"stop": ["e"]}, {"n": 2, "temperature": 0.8, "seed": 4}])
def test_without_a_stream_each_choice_comes_once_and_whole(llm: LLM, more: dict[str, Any]) -> None:
    params = SamplingParams(**{"max_tokens": 16, "temperature": 0.0, **more})
    streamed = outputs(llm, params, stream=True)
    whole = {(one.rid, one.index): one for one in outputs(llm, params, stream=False)}
    assert len(whole) == len(PROMPTS) * params.n
    texts = dict.fromkeys(whole, "")
    for one in streamed:
        texts[one.rid, one.index] += one.text_delta
    last = {(one.rid, one.index): one for one in streamed}
    for key, one in whole.items():
        assert one.finish_reason == last[key].finish_reason
        assert one.token_ids == one.new_token_ids == last[key].token_ids
        assert one.text == one.text_delta == texts[key]
