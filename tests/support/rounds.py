"""Engines, prompts and sampling parameters that tests of rounds share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.config import EngineConfig
from specengine.core.request import TokenLogprob
from specengine.engine.llm import Generation
from specengine.engine.round.executor import RoundExecutor

ON_CPU = pytest.mark.skipif(
    torch.cuda.is_available(), reason="graphs are tested where there is a GPU"
)
NOT_READY = "a request that the drafter has seen too little of"  # a fallback that is no fault
CONTEXT = 96
NEW_TOKENS = 24
PROMPTS = ["The quick brown fox", "x", "0123456789" * 4]
MANY = [*PROMPTS, "ab", "The lazy dog", "01" * 30, "y z", "The quick brown fox"]

GREEDY = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, temperature=0.0)
SAMPLED = [  # every parameter of sampling, and a greedy request among them
    replace(GREEDY, temperature=0.8, top_p=0.95, seed=1),
    GREEDY,
    replace(GREEDY, temperature=1.3, top_k=20, min_p=0.02, seed=2),
    replace(GREEDY, temperature=0.6, top_k=7, top_p=0.7, seed=-3),
    replace(GREEDY, temperature=1.0, seed=4),
    replace(GREEDY, temperature=2.0, min_p=0.1, seed=2**62),
    replace(GREEDY, temperature=1.0, top_k=1, seed=6),
]
EDITED = [
    replace(GREEDY, frequency_penalty=0.8, presence_penalty=-0.2, logit_bias={5: 2.0, 9: -3.0}),
    replace(
        GREEDY, temperature=0.9, repetition_penalty=1.4, seed=5, min_tokens=9, stop_token_ids=(7,)
    ),
    replace(GREEDY, temperature=0.7, top_p=0.9, seed=6),
]
BIASED = [replace(GREEDY, logit_bias=dict.fromkeys(range(3, 40, 3), 9.0)), GREEDY, GREEDY]
WITH_LOGPROBS = [replace(GREEDY, logprobs=3), replace(EDITED[1], logprobs=0), SAMPLED[0]]


def make(target: Path, spec: SpecConfig | None, **flags: Any) -> LLM:
    return LLM(str(target), spec, **{"dtype": "float32", "max_total_tokens": 2048, **flags})


def with_graphs(llm: LLM, **trace: Any) -> EngineConfig:
    """The engine's settings, as they are where CUDA graphs are captured."""
    config = llm.engine.parts.config
    graph = replace(config.graph, disable_cuda_graph=False, cuda_graph_bs=(1, 2, 4))
    return replace(config, graph=graph, trace=replace(config.trace, **trace))


def fallbacks(rounds: RoundExecutor | Mapping[str, int]) -> set[str]:
    """Why rounds ran on the host, apart from NOT_READY. A mapping: counters."""
    counters = rounds.counters if isinstance(rounds, RoundExecutor) else rounds
    names = (name for name in counters if name.startswith("fallback: "))
    return {name.removeprefix("fallback: ") for name in names} - {NOT_READY}


def summary(outputs: list[Generation]) -> list[Any]:
    """Tokens, why they end, and how drafts fared, of each output."""
    found = [one.completions[0] for one in outputs]
    return [
        (one.token_ids, one.finish_reason, one.spec.histogram, one.spec.num_draft_tokens)
        for one in found
    ]


def assert_same(
    host: LLM, llm: LLM, prompts: list[Any], params: list[SamplingParams] | SamplingParams
) -> list[Generation]:
    """Both emit the same tokens, and accept as many drafts in as many rounds."""
    found, expected = llm.generate(prompts, params), host.generate(prompts, params)
    assert summary(found) == summary(expected)
    llm.engine.scheduler.check_invariant()
    return found


def assert_same_tokens(
    host: LLM, llm: LLM, prompts: list[Any], params: list[SamplingParams] | SamplingParams
) -> list[Generation]:
    found, expected = llm.generate(prompts, params), host.generate(prompts, params)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    llm.engine.scheduler.check_invariant()
    return found


def assert_close(found: list[TokenLogprob], expected: list[TokenLogprob]) -> None:
    assert [one.token for one in found] == [one.token for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]


def assert_same_logprobs(host: LLM, llm: LLM) -> None:
    for params in (WITH_LOGPROBS, [GREEDY, *WITH_LOGPROBS[:2]]):
        expected, found = host.generate(PROMPTS, params), llm.generate(PROMPTS, params)
        for one, other in zip(found, expected, strict=True):
            assert one.token_ids == other.token_ids
            assert_close(one.completions[0].logprobs, other.completions[0].logprobs)
