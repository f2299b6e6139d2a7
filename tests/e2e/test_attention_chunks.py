"""Llama 4's attention within chunks: drafts that cross a border change no token, in chains and
trees, on the host's rounds and the device's, with prompts in parts and with a cached prefix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specengine import LLM, SamplingParams, SpecConfig
from specengine.layers.attention import Attention
from tests.support.device_rounds import run_on_device

# The family's small configuration has chunks of 24: these begin before and behind several borders.
PROMPTS = ["x", "The quick brown fox jum", "to be or not to be, that is the question: to be " * 2]
GREEDY = SamplingParams(max_tokens=28, temperature=0.0, ignore_eos=True)


def lookup(branches: int) -> SpecConfig:
    return SpecConfig(
        algorithm="NGRAM",
        adaptive=False,
        ngram_min_match=1,
        ngram_shared_corpus=True,
        num_draft_tokens=6,
        ngram_branches=branches,
    )


def make(folder: Path, spec: SpecConfig | None = None, **flags: int | bool) -> LLM:
    """On the CPU, where device rounds run without graphs, also beside a GPU."""
    given: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_total_tokens": 4096}
    return LLM(str(folder), spec, **given, **flags)


def texts(llm: LLM) -> list[list[int]]:
    return [one.token_ids for one in llm.generate(PROMPTS, GREEDY)]


@pytest.fixture(scope="module")
def target(small_models: dict[str, Path]) -> Path:
    return small_models["llama4"]


@pytest.fixture(scope="module")
def alone(target: Path) -> list[list[int]]:
    return texts(make(target, disable_radix_cache=True))


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("branches", [1, 3], ids=["chain", "tree"])
def test_drafts_across_a_border_change_no_token(
    branches: int, on_device: bool, target: Path, alone: list[list[int]]
) -> None:
    llm = make(target, lookup(branches), chunked_prefill_size=16)
    if on_device:
        run_on_device(llm)
    assert [texts(llm), texts(llm)] == [alone, alone]
    assert llm.engine.scheduler.spec_totals.num_accepted_tokens > 20


def test_chunks_are_what_the_tokens_come_from(
    target: Path, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the test above would compare two models that see everything."""
    init = Attention.__init__

    def whole(self: Attention, *given: object, **named: object) -> None:
        init(self, *given, **named | {"attention_chunk": None})  # type: ignore[arg-type]

    monkeypatch.setattr(Attention, "__init__", whole)
    assert texts(make(target)) != alone
