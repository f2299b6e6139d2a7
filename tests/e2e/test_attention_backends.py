"""Engines on FlashAttention and FlashInfer emit what plain decoding emits: over PyTorch functions
on any machine, and on a GPU over the libraries, where one is installed."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.batch import AttentionBackend
from specengine.engine.chat_template import render_chat
from specengine.engine.plan_ahead import make_plan_ahead
from specengine.kernels.attention import flash_attention, flash_attention_ref
from specengine.runner.attention.by_phase import PhasedAttentionBackend
from specengine.runner.attention.flash_backend import FlashAttentionBackend
from tests.e2e.near_ties import assert_same_but_for_ties
from tests.halves import each_value
from tests.runner.test_attention_flashinfer import in_pytorch  # noqa: F401
from tests.support.cpu_graphs import graphs_on_the_cpu, use_functions

PROMPTS = ["What is the capital of France?", "Count from one to ten.", "Hello! Who are you?"]
GREEDY = SamplingParams(max_tokens=14, ignore_eos=True, temperature=0.0)
CHAIN: dict[str, Any] = {"num_steps": 3, "adaptive": False}
TREE: dict[str, Any] = CHAIN | {"eagle_topk": 3, "num_draft_tokens": 9}
SPECS = {
    "plain": None,
    "NGRAM": SpecConfig(algorithm="NGRAM", adaptive=False),
    "chain": SpecConfig(algorithm="EAGLE3", **CHAIN),
    "tree": SpecConfig(algorithm="EAGLE3", **TREE),
}

KINDS = ["fa", "flashinfer", "fa for prompts", "flashinfer for prompts"]


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    fa = FlashAttentionBackend(flash_attention_ref.flash_attention)
    if request.param == "fa":
        return fa
    flashinfer: AttentionBackend = request.getfixturevalue("in_pytorch")
    if request.param == "flashinfer":
        return flashinfer
    first = request.param == "fa for prompts"
    return PhasedAttentionBackend(*(fa, flashinfer) if first else (flashinfer, fa))


def make(spec: SpecConfig | None, **flags: Any) -> LLM:
    return LLM("tiny", spec, **{"dtype": "float32", "max_total_tokens": 2048, **flags})


def tokens(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    found = [one.token_ids for one in llm.generate(prompts(llm), params)]
    llm.engine.scheduler.check_invariant()
    return found


def prompts(llm: LLM) -> list[list[int]]:
    """As chats, which the tiny model was trained on."""
    return [render_chat(llm.tokenizer, [{"role": "user", "content": text}]) for text in PROMPTS]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return tokens(make(None, device="cpu"))


def run_on(llm: LLM, backend: AttentionBackend) -> None:
    parts = llm.engine.parts
    for runner in (parts.worker.runner, *getattr(parts.drafter, "runners", ())):
        runner.attn_backend = backend


@pytest.mark.parametrize(("name", "backend"), each_value(1, SPECS, KINDS), indirect=["backend"])
def test_backend_in_pytorch_changes_no_token(
    name: str, backend: AttentionBackend, plain: list[list[int]]
) -> None:
    """Each backend with some of the drafters; with all of them in make test-all."""
    llm = make(SPECS[name], device="cpu", enable_plan_stream=True)
    run_on(llm, backend)
    parts = llm.engine.parts
    llm.engine.host_round.plan_ahead = make_plan_ahead(
        parts.config, parts.worker.runner, parts.drafter
    )
    predicts = backend.limits.plans_on_host and name in ("chain", "tree")
    assert (llm.engine.host_round.plan_ahead is not None) == predicts
    assert tokens(llm) == plain
    again = tokens(llm, replace(GREEDY, max_tokens=7))  # on what the cache has by then
    assert again == [one[:7] for one in plain]


@pytest.mark.skipif(torch.cuda.is_available(), reason="graphs are tested where there is a GPU")
@pytest.mark.parametrize(
    ("backend", "name"), each_value(1, KINDS, ["chain", "tree"]), indirect=["backend"]
)
def test_backend_with_fixed_buffers_changes_no_token(
    name: str,
    backend: AttentionBackend,
    plain: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_functions(monkeypatch)
    llm = make(SPECS[name], device="cpu", enable_plan_stream=True)
    run_on(llm, backend)
    counters = graphs_on_the_cpu(llm)
    run_on(llm, backend)
    parts = llm.engine.parts
    llm.engine.host_round.plan_ahead = make_plan_ahead(
        parts.config, parts.worker.runner, parts.drafter
    )
    assert tokens(llm) == plain
    assert counters["verify"]["replays"] > 2


HAS = {"fa": flash_attention.is_installed(), "flashinfer": find_spec("flashinfer") is not None}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("kind", HAS)
def test_backend_on_a_gpu_changes_no_token_but_at_ties(kind: str, name: str, graphs: bool) -> None:
    """These libraries do not compute in float32, and a row's bits may depend on its batch. So each
    answer is held to plain decoding on the same backend up to the first place where the two best
    tokens are as near as bfloat16 rounds."""
    if not HAS[kind]:
        pytest.skip(f"no library for {kind} is installed")
    flags = {"attention_backend": kind, "dtype": "bfloat16", "disable_cuda_graph": not graphs}
    params = replace(GREEDY, logprobs=2)
    plain = make(None, **flags)
    expected = plain.generate(prompts(plain), params)
    for flag in (False, True):
        llm = make(SPECS[name], **flags, enable_plan_stream=flag)
        assert_same_but_for_ties(llm.generate(prompts(llm), GREEDY), expected)
