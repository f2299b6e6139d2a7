"""Drafters that read prompts before the host knows the first tokens are left as the others are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specengine import LLM, SamplingParams, SpecConfig
from specengine.draft.eagle.worker import EagleWorker
from specengine.draft.mtp.worker import MtpLayersWorker
from tests.draft.eagle_checkpoints import eagle, eagle3

PROMPTS = ["The quick brown fox", "x", "0123456789" * 7, "ab" * 9, "to be or not to be"]
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "in chunks": {"chunked_prefill_size": 16},
    "mixed": {"chunked_prefill_size": 16, "enable_mixed_chunk": True, "page_size": 4},
    "retracted": {"max_total_tokens": 176, "disable_radix_cache": True},
}
SAMPLED = SamplingParams(max_tokens=24, temperature=0.8, seed=3, ignore_eos=True)


def calls_of(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often its drafter was seeded, either way."""
    drafter, calls = llm.engine.drafter, Counter[str]()
    assert isinstance(drafter, EagleWorker)

    def watch(name: str, call: Callable[..., None]) -> None:
        def counted(*args: Any) -> None:
            calls[name] += 1
            call(*args)

        monkeypatch.setattr(drafter, name, counted)

    watch("seed", drafter.seed)
    watch("seed_early", drafter.seed_early)
    return calls


def make(target: Path, algorithm: str, draft: Path | None, **flags: Any) -> LLM:
    path = None if draft is None else str(draft)
    spec = SpecConfig(algorithm=algorithm, draft_model_path=path, adaptive=False, num_steps=3)
    given: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 2048, "random_seed": 1}
    return LLM(str(target), spec, device="cpu", **{**given, **flags})


def states_of(llm: LLM) -> torch.Tensor:
    assert isinstance(llm.engine.drafter, EagleWorker)
    return llm.engine.drafter.states


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3"])
def test_states_are_the_same(
    algorithm: str,
    way: str,
    small_models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = small_models["llama"]
    draft = (eagle if algorithm == "EAGLE" else eagle3)(tmp_path / "draft", target)
    early, late = (make(target, algorithm, draft, **WAYS[way]) for _ in range(2))
    late.engine._early = None
    calls = calls_of(early, monkeypatch)
    for llm in (early, late):
        for number, prompt in enumerate(PROMPTS):
            llm.engine.add_request(str(number), llm.tokenizer.encode(prompt), SAMPLED)
    told: list[dict[str, list[int]]] = [{}, {}]
    while early.engine.has_work:
        for llm, outputs in zip((early, late), told, strict=True):
            outputs |= {one.rid: one.token_ids for one in llm.engine.step()}
        assert torch.equal(states_of(early), states_of(late))
    assert told[0] == told[1]
    assert calls["seed_early"] > 0
    assert (calls["seed"] > 0) == ("chunk" in way or way == "mixed")
    if way == "retracted":
        assert early.engine.stats().num_retractions > 0


@pytest.mark.parametrize(
    "asked",
    [SamplingParams(logprobs=1), SamplingParams(prompt_logprobs=0)],
    ids=["of tokens", "of prompts"],
)
def test_whoever_asks_for_logprobs_waits(
    asked: SamplingParams,
    small_models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are read from what the drafter's forward may write over."""
    target = small_models["llama"]
    llm = make(target, "EAGLE3", eagle3(tmp_path / "draft", target))
    calls = calls_of(llm, monkeypatch)
    llm.generate(PROMPTS[:1], replace(asked, max_tokens=3))
    assert calls == {"seed": 1}


def test_layers_that_are_laid_out_on_the_host_wait() -> None:
    assert not MtpLayersWorker.__new__(MtpLayersWorker).seeds_early


def test_a_plan_of_the_host_waits(small_models: dict[str, Path], tmp_path: Path) -> None:
    """The device may still read it for the forward before."""
    target = small_models["llama"]
    drafter = make(target, "EAGLE3", eagle3(tmp_path / "draft", target)).engine.drafter
    assert isinstance(drafter, EagleWorker)
    assert drafter.seeds_early
    limits = replace(drafter.runner.attn_backend.limits, plans_on_host=True)
    drafter.runner.attn_backend = SimpleNamespace(limits=limits)
    assert not drafter.seeds_early
