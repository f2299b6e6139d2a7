"""Graphs that are captured while there is no work, by engines whose rounds fly on a CPU."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specengine import LLM, SpecConfig
from specengine.core.sampling import SamplingParams
from specengine.engine import graph_round
from specengine.engine.async_engine import AsyncEngine
from specengine.engine.background_capture import QuietTime
from specengine.engine.graph_round import GraphRound
from tests.engine import flying_world
from tests.engine.flying_world import let_fly
from tests.engine.test_graph_round import GREEDY, PROMPTS, SAMPLED, make

ON_CPU = pytest.mark.skipif(
    torch.cuda.is_available(), reason="graphs are tested where there is a GPU"
)


def spec_of(drafters: dict[str, str]) -> SpecConfig:
    path = drafters["EAGLE3"]
    return SpecConfig(algorithm="EAGLE3", adaptive=False, draft_model_path=path, num_steps=3)


@pytest.fixture
def llm(target: Path, drafters: dict[str, str]) -> LLM:
    return make(target, spec_of(drafters))


def tokens(llm: LLM, params: list[SamplingParams]) -> list[list[int]]:
    return [one.token_ids for one in llm.generate(PROMPTS[: len(params)], params)]


def sampling_sizes(flying: GraphRound) -> list[int]:
    """Of the graphs of rounds that sample, in the order of their capture."""
    return [one.batch_size for one in flying.captured if one.choosing == flying.choices.sampled]


@ON_CPU
def test_whoever_samples_later_finds_a_graph(
    llm: LLM, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flying = let_fly(llm, monkeypatch)
    flying.capture()
    assert sampling_sizes(flying) == [1]
    count = 0
    while llm.engine.use_idle_moment():
        count += 1
    assert sampling_sizes(flying) == [1, 2, 4], "one was there"
    assert count == 2
    assert not llm.engine.use_idle_moment()
    captures = flying.counters["captures"]
    for params in (SAMPLED[:1], SAMPLED[:3]):
        assert tokens(llm, params) == tokens(make(target, None), params)
    assert flying.counters["captures"] == captures


@ON_CPU
def test_what_is_in_the_air_lands_first(
    llm: LLM, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round of requests that have ended: it writes where rounds of a capture write."""
    flying = let_fly(llm, monkeypatch)
    flying.capture()
    expected = tokens(make(target, None), [GREEDY] * 2)
    assert tokens(llm, [GREEDY] * 2) == expected
    engine = llm.engine
    assert engine.flights is not None
    assert engine.flights.in_the_air
    assert not engine.has_work
    captures = flying.counters["captures"]
    assert engine.use_idle_moment()
    assert not engine.flights.in_the_air
    assert flying.counters["captures"] == captures
    assert engine.use_idle_moment()
    assert flying.counters["captures"] == captures + 1
    assert tokens(llm, [GREEDY] * 2) == expected


@ON_CPU
@pytest.mark.parametrize("why", ["spent", "no memory", "no compiler"])
def test_it_ends_where_nothing_can_be_captured(
    why: str, llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    flying = let_fly(llm, monkeypatch)
    flying.capture()
    if why == "spent":
        flying.runner.graph_memory.budget = 0
    else:
        error = torch.cuda.OutOfMemoryError if why == "no memory" else KeyError

        def fail(*_: Any) -> None:
            raise error("none left")

        monkeypatch.setattr(graph_round, "capture", fail)
    while llm.engine.use_idle_moment():
        pass
    assert sampling_sizes(flying) == [1]
    assert ("none left" in caplog.text) == (why != "spent")
    monkeypatch.setattr(graph_round, "capture", flying_world.capture)
    assert not llm.engine.use_idle_moment()
    assert sampling_sizes(flying) == [1]
    assert len(tokens(llm, [GREEDY])[0]) == GREEDY.max_tokens


@ON_CPU
def test_memory_is_left_for_what_somebody_asks_for(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    flying = let_fly(llm, monkeypatch)
    flying.capture()
    memory = flying.runner.graph_memory

    @contextmanager
    def measured() -> Iterator[Callable[[], int]]:
        yield lambda: 0
        memory.used += 1

    monkeypatch.setattr(memory, "measured", measured)
    memory.used, memory.budget = 6, 8
    while llm.engine.use_idle_moment():
        pass
    assert memory.used == 6
    told = llm.generate(PROMPTS[:1], [replace(GREEDY, logprobs=1)])[0]
    assert len(told.completions[0].logprobs) == GREEDY.max_tokens
    assert flying.counters.keys() == {"captures", "replays"}, "all of it has flown"


@ON_CPU
@pytest.mark.parametrize("prepares", [True, False])
def test_a_server_does_it_between_requests(
    prepares: bool, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where others may use the device."""
    flying = let_fly(llm, monkeypatch)
    flying.capture()
    served = AsyncEngine(llm.engine, prepares, QuietTime(0.0))

    async def ask(rid: str) -> list[int]:
        ids = llm.engine.parts.tokenizer.encode(PROMPTS[0])
        return [one async for one in served.generate(ids, SAMPLED[0], rid)][-1].token_ids

    try:
        said = asyncio.run(ask("first"))
        for _ in range(500 if prepares else 0):
            if sampling_sizes(flying) == [1, 2, 4]:
                break
            time.sleep(0.01)
        assert asyncio.run(ask("second")) == said
    finally:
        served.shutdown()
    assert sampling_sizes(flying) == ([1, 2, 4] if prepares else [1])


def test_without_rounds_on_the_device_there_is_nothing_to_do(target: Path) -> None:
    assert not make(target, None, disable_cuda_graph=True).engine.use_idle_moment()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_natively(target: Path, drafters: dict[str, str]) -> None:
    """Between requests, while the last round is still in the air."""
    spec = spec_of(drafters)
    expected = tokens(make(target, None), SAMPLED[:3])
    llm = make(target, spec, cuda_graph_bs=(1, 2, 4))
    flying = llm.engine.graph_round
    assert flying is not None
    assert tokens(llm, SAMPLED[:1]) == expected[:1]
    while llm.engine.use_idle_moment():
        pass
    assert sampling_sizes(flying) == [1, 2, 4]
    captures = flying.counters["captures"]
    assert tokens(llm, SAMPLED[:3]) == expected
    assert flying.counters["captures"] == captures
