"""Graphs that are captured while there is no work."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specengine import LLM, SpecConfig
from specengine.core.sampling import SamplingParams
from specengine.engine.async_engine import AsyncEngine
from specengine.engine.background_capture import QuietTime
from specengine.engine.round.executor import RoundExecutor
from tests.support.device_rounds import run_on_device
from tests.support.own_memory import count_own_memory
from tests.support.rounds import GREEDY, ON_CPU, ON_GPU, PROMPTS, SAMPLED, fallbacks, make
from tests.support.waiting import until


def spec_of(drafters: dict[str, str]) -> SpecConfig:
    path = drafters["EAGLE3"]
    return SpecConfig(algorithm="EAGLE3", adaptive=False, draft_model_path=path, num_steps=3)


@pytest.fixture
def llm(target: Path, drafters: dict[str, str]) -> LLM:
    return make(target, spec_of(drafters))


def tokens(llm: LLM, params: list[SamplingParams]) -> list[list[int]]:
    return [one.token_ids for one in llm.generate(PROMPTS[: len(params)], params)]


def sampling_sizes(rounds: RoundExecutor) -> list[int]:
    """Batch sizes of the graphs of rounds that sample, in the order of their capture."""
    return [one.batch_size for one in rounds.captured if one.sampling == rounds.sampling.sampled]


@ON_CPU
def test_requests_that_sample_later_find_a_graph(
    llm: LLM, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = run_on_device(llm)
    rounds.capture()
    assert sampling_sizes(rounds) == [1]
    count = 0
    while llm.engine.use_idle_moment():
        count += 1
    assert sampling_sizes(rounds) == [1, 2, 4], "one was there"
    assert count == 2
    assert not llm.engine.use_idle_moment()
    captures = rounds.counters["captures"]
    for params in (SAMPLED[:1], SAMPLED[:3]):
        assert tokens(llm, params) == tokens(make(target, None), params)
    assert rounds.counters["captures"] == captures


@ON_CPU
def test_round_in_flight_is_collected_before_a_capture(
    llm: LLM, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round of requests that have ended: it writes where rounds of a capture write."""
    rounds = run_on_device(llm)
    rounds.capture()
    expected = tokens(make(target, None), [GREEDY] * 2)
    assert tokens(llm, [GREEDY] * 2) == expected
    engine = llm.engine
    assert engine.pipeline is not None
    assert engine.pipeline.has_in_flight
    assert not engine.has_work
    captures = rounds.counters["captures"]
    assert engine.use_idle_moment()
    assert not engine.pipeline.has_in_flight
    assert rounds.counters["captures"] == captures
    assert engine.use_idle_moment()
    assert rounds.counters["captures"] == captures + 1
    assert tokens(llm, [GREEDY] * 2) == expected


@ON_CPU
@pytest.mark.parametrize("why", ["spent", "no memory", "no compiler"])
def test_captures_end_where_one_is_impossible(
    why: str, llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rounds = run_on_device(llm)
    rounds.capture()
    if why == "spent":
        rounds.runner.graph_memory.budget = 0
    else:
        error = torch.cuda.OutOfMemoryError if why == "no memory" else KeyError

        def fail(*_: Any) -> None:
            raise error("none left")

        monkeypatch.setattr(rounds, "record", fail)
    while llm.engine.use_idle_moment():
        pass
    assert sampling_sizes(rounds) == [1]
    assert ("none left" in caplog.text) == (why != "spent")
    monkeypatch.undo()
    assert not llm.engine.use_idle_moment()
    assert sampling_sizes(rounds) == [1]
    assert len(tokens(llm, [GREEDY])[0]) == GREEDY.max_tokens


@ON_CPU
def test_capture_is_given_up_for_a_request_and_made_again(llm: LLM, target: Path) -> None:
    rounds = run_on_device(llm)
    rounds.capture()
    expected = tokens(make(target, None), SAMPLED[:3])
    points = 0

    def second_point() -> bool:
        nonlocal points
        points += 1
        return points > 1

    assert llm.engine.use_idle_moment(is_wanted=second_point), "there is more to do"
    assert points == 2
    assert sampling_sizes(rounds) == [1], "what was interrupted is not there"
    assert tokens(llm, SAMPLED[:1]) == expected[:1]
    while llm.engine.use_idle_moment():
        pass
    assert sampling_sizes(rounds) == [1, 2, 4]
    captures = rounds.counters["captures"]
    assert tokens(llm, SAMPLED[:3]) == expected
    assert rounds.counters["captures"] == captures


@ON_CPU
def test_memory_is_left_for_features_that_requests_need(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = run_on_device(llm)
    rounds.capture()
    memory = rounds.runner.graph_memory

    @contextmanager
    def measured() -> Iterator[Callable[[], int]]:
        yield lambda: 0
        memory.used += 1

    monkeypatch.setattr(memory, "measured", measured)
    memory.used, memory.budget = 6, 8
    while llm.engine.use_idle_moment():
        pass
    assert memory.used == 6
    output = llm.generate(PROMPTS[:1], [replace(GREEDY, logprobs=1)])[0]
    assert len(output.completions[0].logprobs) == GREEDY.max_tokens
    assert not fallbacks(rounds)


@ON_CPU
@pytest.mark.parametrize("prepares", [True, False])
def test_server_captures_between_requests(
    prepares: bool, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not where other processes may use the device."""
    rounds = run_on_device(llm)
    rounds.capture()
    served = AsyncEngine(llm.engine, prepares, QuietTime(0.0))

    async def ask(rid: str) -> list[int]:
        ids = llm.engine.parts.tokenizer.encode(PROMPTS[0])
        return [one async for one in served.generate(ids, SAMPLED[0], rid)][-1].token_ids

    try:
        emitted = asyncio.run(ask("first"))
        if prepares:
            until(lambda: sampling_sizes(rounds) == [1, 2, 4])
        assert asyncio.run(ask("second")) == emitted
    finally:
        served.shutdown()
    assert sampling_sizes(rounds) == ([1, 2, 4] if prepares else [1])


def test_nothing_is_captured_without_rounds_on_the_device(target: Path) -> None:
    assert not make(target, None, disable_cuda_graph=True).engine.use_idle_moment()


@pytest.mark.parametrize("point", [pytest.param(n, marks=ON_GPU) for n in (1, 3, 5, 8, 12, 16)])
def test_graph_is_captured_after_an_interrupted_capture(
    point: int, target: Path, drafters: dict[str, str]
) -> None:
    """At points of the run before the capture, and amid the capture itself."""
    llm = make(target, spec_of(drafters), cuda_graph_bs=(1, 2, 4))
    rounds = llm.engine.device_rounds
    assert rounds is not None
    expected = tokens(make(target, None), SAMPLED[:3])
    asked: list[int] = []
    while llm.engine.use_idle_moment(is_wanted=lambda: len(asked) == point or asked.append(0)):
        asked.append(0)
    assert len(asked) > point
    assert tokens(llm, SAMPLED[:3]) == expected
    while llm.engine.use_idle_moment():
        pass
    assert sampling_sizes(rounds) == [1, 2, 4]
    captures = rounds.counters["captures"]
    assert tokens(llm, SAMPLED[:3]) == expected
    assert rounds.counters["captures"] == captures


@pytest.mark.parametrize("point", [pytest.param(n, marks=ON_GPU) for n in (3, 8)])
def test_interrupted_captures_use_no_memory_up(
    point: int, target: Path, drafters: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often requests interrupt them: what they held goes with them. The first ones load
    kernels and fill segments of the allocator; behind those nothing is added."""
    count_own_memory(monkeypatch)
    llm = make(target, spec_of(drafters), cuda_graph_bs=(1, 2, 4))
    memory = llm.engine.parts.worker.runner.graph_memory
    used, in_tensors = list[int](), list[int]()
    while len(used) < 60:
        asked: list[int] = []

        def is_wanted(asked: list[int] = asked) -> bool:
            asked.append(0)
            return len(asked) == point

        assert llm.engine.use_idle_moment(is_wanted=is_wanted)
        if len(asked) == point:
            gc.collect()
            used.append(memory.used)
            in_tensors.append(torch.cuda.memory_allocated())
    assert max(in_tensors[30:]) <= max(in_tensors[:30])
    segments = [one >> 20 for one in used]  # of 2 MiB or more
    assert max(segments[30:]) <= max(segments[:30]) + 2, segments
    while llm.engine.use_idle_moment():
        pass
    rounds = llm.engine.device_rounds
    assert rounds is not None
    assert sampling_sizes(rounds) == [1, 2, 4]


@pytest.mark.parametrize("_", [pytest.param(None, marks=ON_GPU)])
def test_graphs_captured_between_requests_serve_the_next(
    _: None, target: Path, drafters: dict[str, str]
) -> None:
    """While the last round is still in flight."""
    spec = spec_of(drafters)
    expected = tokens(make(target, None), SAMPLED[:3])
    llm = make(target, spec, cuda_graph_bs=(1, 2, 4))
    rounds = llm.engine.device_rounds
    assert rounds is not None
    assert tokens(llm, SAMPLED[:1]) == expected[:1]
    while llm.engine.use_idle_moment():
        pass
    assert sampling_sizes(rounds) == [1, 2, 4]
    captures = rounds.counters["captures"]
    assert tokens(llm, SAMPLED[:3]) == expected
    assert rounds.counters["captures"] == captures
