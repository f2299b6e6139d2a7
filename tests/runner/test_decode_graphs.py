"""Decode graphs give what eager decoding gives, at every batch size, padded or not."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from specengine import LLM, SamplingParams, SpecConfig
from tests.support.families import FAMILIES

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

PROMPTS = [f"{word} and {word} again" for word in ("one", "two", "three", "four", "five")]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, temperature=1.0, seed=3, ignore_eos=True)


def make(folder: Path, **flags: Any) -> LLM:
    return LLM(str(folder), **{"dtype": "float32", "max_total_tokens": 4096, **flags})


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", FAMILIES)
def test_decode_graphs_give_the_tokens_of_eager_steps(
    family: str, params: SamplingParams, small_models: dict[str, Path]
) -> None:
    eager = make(small_models[family], disable_cuda_graph=True)
    captured = make(small_models[family], cuda_graph_bs=(1, 2, 8))
    for count in (1, 2, 5):
        expected = [one.token_ids for one in eager.generate(PROMPTS[:count], params)]
        assert [one.token_ids for one in captured.generate(PROMPTS[:count], params)] == expected
    assert captured.engine.stats().num_graph_forwards > 60
    assert eager.engine.stats().num_graph_forwards == 0


def test_gpu_gives_the_tokens_of_the_cpu(small_models: dict[str, Path]) -> None:
    expected = make(small_models["qwen3"], device="cpu").generate(PROMPTS, GREEDY)
    found = make(small_models["qwen3"]).generate(PROMPTS, GREEDY)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]


def test_padding_off_counts_the_missing_size(small_models: dict[str, Path]) -> None:
    llm = make(small_models["llama"], cuda_graph_bs=(2,), disable_cuda_graph_padding=True)
    llm.generate(PROMPTS[:1], SAMPLED)
    graphs = llm.engine.parts.worker.runner.decode_graphs
    assert graphs is not None
    assert graphs.counters["fallback: batch size not captured, padding off"] >= 23


@pytest.mark.parametrize("algorithm", [None, "EAGLE3"])
def test_large_prefill_in_parts_gives_the_tokens_of_an_eager_one(algorithm: str | None) -> None:
    """More prompts than a prefill graph holds run in parts, some of them in the same graph, whose
    outputs drafters read too."""
    flags: dict[str, Any] = {"max_running_requests": 160, "max_total_tokens": 1 << 15}
    flags |= {"model": "tiny", "dtype": "float32"}
    asked = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    draw = random.Random(0)
    prompts = [[draw.randrange(4096) for _ in range(30)] for _ in range(150)]
    spec = (
        None if algorithm is None else SpecConfig(algorithm=algorithm, adaptive=False, num_steps=2)
    )
    eager = LLM(spec=spec, disable_cuda_graph=True, **flags).generate(prompts, asked)
    captured = LLM(spec=spec, **flags)
    found = captured.generate(prompts, asked)
    assert [one.token_ids for one in found] == [one.token_ids for one in eager]
    if spec is not None:
        accepted = [sum(one.spec.num_accepted for one in many) for many in (eager, found)]
        assert accepted[1] == pytest.approx(accepted[0], rel=0.1)
    graphs = captured.engine.stats().graphs["prefill"]
    assert graphs.replays == 3
    assert graphs.fallbacks == {}
