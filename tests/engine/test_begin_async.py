"""Drafters that begin before the host knows the first tokens have the state of those that wait."""

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
from specengine.core.batch import ForwardMode
from specengine.core.interfaces import LogitsOutput
from specengine.core.transfer import Arriving
from specengine.draft.eagle.worker import EagleWorker
from specengine.draft.mtp.worker import MtpLayersWorker
from specengine.draft.worker import DraftWorker
from specengine.engine import prefill
from specengine.engine.parts import BeginAsync, EngineParts
from specengine.layers import prefill_sampler
from specengine.runner.forward_graphs.prepared import PartsForward
from tests.draft.eagle_checkpoints import almost_bigram, eagle, eagle3
from tests.halves import each_value, slow_but
from tests.support.cpu_graphs import graphs_on_the_cpu, use_functions

PROMPTS = ["The quick brown fox", "x", "0123456789" * 7, "ab" * 9, "to be or not to be"]
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "in chunks": {"chunked_prefill_size": 16},
    "mixed": {"chunked_prefill_size": 16, "enable_mixed_chunk": True, "page_size": 4},
    "retracted": {"max_total_tokens": 176, "disable_radix_cache": True},
}
SAMPLED = SamplingParams(max_tokens=24, temperature=0.8, seed=3, ignore_eos=True)


def calls_of(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often its drafter began, either way."""
    drafter, calls = llm.engine.drafter, Counter[str]()
    assert isinstance(drafter, DraftWorker)

    def watch(name: str, call: Callable[..., None]) -> None:
        def counted(*args: Any) -> None:
            calls[name] += 1
            call(*args)

        monkeypatch.setattr(drafter, name, counted)

    watch("begin", drafter.begin)
    watch("begin_async", drafter.begin_async)
    return calls


def make(target: Path, algorithm: str, draft: Path | None, **flags: Any) -> LLM:
    path = None if draft is None else str(draft)
    spec = SpecConfig(algorithm=algorithm, draft_model_path=path, adaptive=False, num_steps=3)
    given: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 2048, "random_seed": 1}
    return LLM(str(target), spec, device="cpu", **{**given, **flags})


def begin_after_prefill(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, begin = llm.engine.parts, prefill.async_begin

    def of_others(given: EngineParts, *more: Any) -> BeginAsync | None:
        return None if given is parts else begin(given, *more)

    monkeypatch.setattr(prefill, "async_begin", of_others)


@pytest.fixture
def llm(small_models: dict[str, Path], tmp_path: Path) -> LLM:
    target = small_models["llama"]
    return make(target, "EAGLE3", eagle3(tmp_path / "draft", target))


def states_of(llm: LLM) -> torch.Tensor:
    assert isinstance(llm.engine.drafter, EagleWorker)
    return llm.engine.drafter.states


def keys_of(llm: LLM) -> torch.Tensor:
    assert isinstance(llm.engine.drafter, EagleWorker)
    return llm.engine.drafter.first_keys


@pytest.mark.parametrize(("algorithm", "way"), each_value(1, ["EAGLE", "EAGLE3"], WAYS))
def test_async_begin_leaves_the_same_states(
    algorithm: str,
    way: str,
    small_models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = small_models["llama"]
    draft = (eagle if algorithm == "EAGLE" else eagle3)(tmp_path / "draft", target)
    early, late = (make(target, algorithm, draft, **WAYS[way]) for _ in range(2))
    begin_after_prefill(late, monkeypatch)
    for llm in (early, late):
        keys_of(llm).fill_(99)  # as of others, which a paused drafter missed
    calls = calls_of(early, monkeypatch)
    for llm in (early, late):
        for number, prompt in enumerate(PROMPTS):
            llm.engine.add_request(str(number), llm.tokenizer.encode(prompt), SAMPLED)
    found: list[dict[str, list[int]]] = [{}, {}]
    while early.engine.has_work:
        for llm, outputs in zip((early, late), found, strict=True):
            outputs |= {one.rid: one.token_ids for one in llm.engine.step()}
        assert torch.equal(states_of(early), states_of(late))
        assert torch.equal(keys_of(early), keys_of(late))
    assert set(keys_of(early).tolist()) == {0, 99}
    assert found[0] == found[1]
    assert calls["begin_async"] > 0
    assert (calls["begin"] > 0) == ("chunk" in way)
    if way == "retracted":
        assert early.engine.stats().num_retractions > 0


@pytest.mark.parametrize("way", slow_but(["in chunks", "retracted"], WAYS))
def test_async_begin_of_a_smaller_model_changes_no_token(
    way: str, small_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = almost_bigram(tmp_path / "target", small_models["llama"], 0.03)
    draft = almost_bigram(tmp_path / "draft", target, 1.0)
    early, late = (make(target, "STANDALONE", draft, **WAYS[way]) for _ in range(2))
    begin_after_prefill(late, monkeypatch)
    calls = calls_of(early, monkeypatch)
    params = replace(SAMPLED, temperature=0.0)
    found = [[one.token_ids for one in llm.generate(PROMPTS, params)] for llm in (early, late)]
    assert found[0] == found[1]
    totals = [llm.engine.scheduler.spec_totals for llm in (early, late)]
    assert totals[0] == totals[1]
    assert totals[0].num_accepted_tokens > 0
    assert calls["begin_async"] > 0


@pytest.mark.parametrize(("number", "length", "chunk"), [(140, 20, -1), (90, 5, 850)])
def test_async_begin_leaves_the_same_states_where_prompts_run_in_parts(
    number: int,
    length: int,
    chunk: int,
    small_models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More prompts than a graph holds: parts of one form, and the last in the middle of its own."""
    use_functions(monkeypatch)
    parts: list[tuple[int, int]] = []  # of forwards in parts: parts, requests
    run = PartsForward.run

    def watched(forward: PartsForward, *given: Any, **named: Any) -> LogitsOutput:
        parts.append((len(forward.parts), forward.batch.batch_size))
        return run(forward, *given, **named)

    monkeypatch.setattr(PartsForward, "run", watched)
    target = small_models["llama"]
    given: dict[str, Any] = {"chunked_prefill_size": chunk, "max_running_requests": 160}
    given |= {"max_total_tokens": 8192, "context_length": 256}
    draft = eagle3(tmp_path / "draft", target)
    early, late = (make(target, "EAGLE3", draft, **given) for _ in range(2))
    begin_after_prefill(late, monkeypatch)
    graphs_on_the_cpu(early)
    calls = calls_of(early, monkeypatch)
    for place in range(number):
        prompt = [7 + place, *range(30, 30 + length + place % 9)]
        for llm in (early, late):
            llm.engine.add_request(str(place), prompt, SAMPLED)
    for _ in range(3):
        for llm in (early, late):
            llm.engine.step()
        torch.testing.assert_close(states_of(early), states_of(late), rtol=1e-5, atol=1e-5)
        assert torch.equal(keys_of(early), keys_of(late))
    assert calls == {"begin_async": 1 if chunk < 0 else 2}
    assert parts == [(3, 140)] if chunk < 0 else parts == [(2, 86)]


@pytest.mark.parametrize(
    "asked",
    [SamplingParams(logprobs=1), SamplingParams(prompt_logprobs=0)],
    ids=["of tokens", "of prompts"],
)
def test_requests_for_logprobs_begin_after_the_prefill(
    asked: SamplingParams, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read from what the drafter's forward may write over."""
    calls = calls_of(llm, monkeypatch)
    llm.generate(PROMPTS[:1], replace(asked, max_tokens=3))
    assert calls == {"begin": 1}


def test_first_tokens_are_awaited_after_the_drafter_is_launched(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First tokens are on their way to it before the drafter's forward, and waited for after."""
    drafter, calls = llm.engine.drafter, list[str]()
    assert isinstance(drafter, EagleWorker)

    class Noted(Arriving):
        def __init__(self, values: torch.Tensor) -> None:
            calls.append("sent")
            super().__init__(values)

        def read(self) -> torch.Tensor:
            calls.append("read")
            return super().read()

    def begin_async(*args: Any) -> None:
        calls.append("begun")

    monkeypatch.setattr(prefill_sampler, "Arriving", Noted)
    monkeypatch.setattr(drafter, "begin_async", begin_async)
    llm.engine.add_request("0", llm.tokenizer.encode(PROMPTS[0]), SAMPLED)
    llm.engine.step()
    assert calls == ["sent", "begun", "read"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("graphs", [True, False])
def test_async_begin_leaves_the_same_states_on_a_gpu(
    graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where prompts run in parts, and in a graph that is captured only now."""
    spec = SpecConfig(algorithm="EAGLE3", adaptive=False, num_steps=3)
    flags: dict[str, Any] = {"dtype": "float32", "disable_cuda_graph": not graphs}
    flags |= {"max_running_requests": 80, "max_total_tokens": 1 << 14}
    early, late = (LLM("tiny", spec, **flags) for _ in range(2))
    begin_after_prefill(late, monkeypatch)
    for number in (1, 9, 70):
        prompts = [[7 + place, *range(100, 120 + place % 9)] for place in range(number)]
        for llm in (early, late):
            for place, prompt in enumerate(prompts):
                llm.engine.add_request(f"{number}.{place}", prompt, SAMPLED)
            llm.engine.step()
        torch.testing.assert_close(states_of(early), states_of(late), rtol=1e-4, atol=1e-4)
        for llm in (early, late):
            while llm.engine.has_work:
                llm.engine.step()


def test_mtp_layers_do_not_begin_async() -> None:
    assert not MtpLayersWorker.__new__(MtpLayersWorker).begins_async


def test_attention_planned_on_the_host_does_not_begin_async(llm: LLM) -> None:
    """The device may still read it for the forward before."""
    drafter = llm.engine.drafter
    assert isinstance(drafter, EagleWorker)
    assert drafter.begins_async
    backend = drafter.runner.attn_backend.for_mode(ForwardMode.EXTEND)
    limits = replace(backend.limits, plans_on_host=True)
    planned = SimpleNamespace(limits=limits)
    drafter.runner.attn_backend = SimpleNamespace(for_mode=lambda mode: planned)
    assert not drafter.begins_async
