"""Decode graphs give what eager decoding gives, at every batch size, padded or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specengine import LLM, SamplingParams

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

PROMPTS = [f"{word} and {word} again" for word in ("one", "two", "three", "four", "five")]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, temperature=1.0, seed=3, ignore_eos=True)


def make(folder: Path, **flags: Any) -> LLM:
    return LLM(str(folder), **{"dtype": "float32", "max_total_tokens": 4096, **flags})


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_graphs_change_nothing(
    family: str, params: SamplingParams, small_models: dict[str, Path]
) -> None:
    eager = make(small_models[family], disable_cuda_graph=True)
    captured = make(small_models[family], cuda_graph_bs=(1, 2, 8))
    for count in (1, 2, 5):
        expected = [one.token_ids for one in eager.generate(PROMPTS[:count], params)]
        assert [one.token_ids for one in captured.generate(PROMPTS[:count], params)] == expected
    assert captured.engine.stats().num_graph_forwards > 60
    assert eager.engine.stats().num_graph_forwards == 0


def test_the_gpu_says_what_the_cpu_says(small_models: dict[str, Path]) -> None:
    expected = make(small_models["qwen3"], device="cpu").generate(PROMPTS, GREEDY)
    found = make(small_models["qwen3"]).generate(PROMPTS, GREEDY)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]


def test_fallbacks_are_counted_with_their_reason(small_models: dict[str, Path]) -> None:
    llm = make(small_models["llama"], cuda_graph_bs=(2,), disable_cuda_graph_padding=True)
    llm.generate(PROMPTS[:1], SAMPLED)
    graph = llm.engine.parts.worker.runner.graph
    assert graph is not None
    assert graph.counters["fallback: batch size not captured, padding off"] >= 23


def test_many_prompts_at_once_change_nothing(small_models: dict[str, Path]) -> None:
    """More than a graph of prefills holds: they run in parts."""
    flags = {"max_running_requests": 80, "max_total_tokens": 16384}
    asked = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    prompts = [f"{number} and {number * number} again" for number in range(75)]
    eager = make(small_models["llama"], disable_cuda_graph=True, **flags)
    expected = [one.token_ids for one in eager.generate(prompts, asked)]
    captured = make(small_models["llama"], **flags)
    assert [one.token_ids for one in captured.generate(prompts, asked)] == expected
    graphs = captured.engine.stats().graphs["prefill"]
    assert graphs.replays > 1
    assert graphs.fallbacks == {}
