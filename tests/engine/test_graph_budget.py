"""When the memory for graphs is spent: what was captured goes on, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specengine import LLM, SamplingParams, SpecConfig
from specengine.engine import graph_round
from specengine.runner import graph_cache
from specengine.runner.fallbacks import MEMORY_SPENT, GraphStats
from specengine.runner.memory import graph_memory
from tests.engine import flying_world
from tests.engine.flying_world import let_fly
from tests.engine.test_graph_round import GREEDY, PROMPTS, SAMPLED, make
from tests.support.cpu_graphs import capture as capture_function
from tests.support.cpu_graphs import graphs_on_the_cpu

ON_CPU = pytest.mark.skipif(
    torch.cuda.is_available(), reason="functions that stand for graphs take no memory of a GPU"
)
GRAPH = 10  # bytes


@dataclass
class Card:
    """A GPU of which every capture takes a bit."""

    free: int = 1000

    def reads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cuda = SimpleNamespace(
            is_available=lambda: True,
            empty_cache=lambda: None,
            graph_pool_handle=lambda: (0, 1),
            mem_get_info=lambda: (self.free, 1000),
        )
        monkeypatch.setattr(graph_memory, "torch", SimpleNamespace(cuda=cuda))

    def taken_by(self, capture: Callable[..., Any]) -> Callable[..., Any]:
        def taking(run: Callable[[], object], pool: Any) -> Any:
            self.free -= GRAPH
            return capture(run, pool)

        return taking


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card()
    card.reads(monkeypatch)
    return card


@pytest.fixture
def spec(drafters: dict[str, str]) -> SpecConfig:
    path = drafters["EAGLE3"]
    return SpecConfig(algorithm="EAGLE3", adaptive=False, draft_model_path=path, num_steps=3)


def tokens(llm: LLM, params: list[SamplingParams]) -> list[list[int]]:
    return [one.token_ids for one in llm.generate(PROMPTS[: len(params)], params)]


@ON_CPU
def test_rounds_of_other_forms_stay_on_the_ground(
    card: Card, spec: SpecConfig, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One byte is left after the first graph, so that there is a second."""
    plain, llm = make(target, None), make(target, spec, device="cpu")
    flying = let_fly(llm, monkeypatch)
    monkeypatch.setattr(graph_round, "capture", card.taken_by(flying_world.capture))
    memory, grounded = flying.runner.graph_memory, 0
    memory.budget = GRAPH + 1
    run = llm.engine.round.run

    def counted(*given: Any) -> Any:
        nonlocal grounded
        grounded += 1
        return run(*given)

    monkeypatch.setattr(llm.engine.round, "run", counted)
    for params, flies in (
        ([GREEDY], True),
        ([GREEDY] * 2, True),  # spends the rest
        ([GREEDY] * 3, False),  # until so few are left that there is a graph
        ([SAMPLED[0]], False),
        ([GREEDY], True),
    ):
        before, replays = grounded, flying.counters["replays"]
        assert tokens(llm, params) == tokens(plain, params)
        assert grounded == before if flies else grounded > before + 3
        assert flying.counters["replays"] > replays or not flies
    assert memory.used == 2 * GRAPH
    assert [form.batch_size for form in flying.captured] == [1, 2]
    stats = GraphStats.of(flying.counters)
    assert stats.captures == 2
    assert stats.fallbacks == {MEMORY_SPENT: grounded}


@ON_CPU
def test_at_start_the_largest_come_first(
    card: Card,
    spec: SpecConfig,
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And serve smaller batches."""
    plain, llm = make(target, None), make(target, spec, device="cpu")
    flying = let_fly(llm, monkeypatch)
    monkeypatch.setattr(graph_round, "capture", card.taken_by(flying_world.capture))
    monkeypatch.setattr(graph_memory, "_LITTLE", 0)
    assert flying.batch_sizes == [1, 2, 4]
    flying.runner.graph_memory.budget = 2 * GRAPH
    flying.capture()
    assert flying.batch_sizes == [2, 4]
    assert f"{MEMORY_SPENT}: no round graphs of 1" in caplog.text
    assert tokens(llm, [GREEDY]) == tokens(plain, [GREEDY])
    assert {form.batch_size for form in flying.captured} == {2, 4}
    assert flying.counters["replays"] > 3
    assert flying.runner.graph_memory.used == 2 * GRAPH


@ON_CPU
def test_all_come_where_there_is_room(card: Card, caplog: pytest.LogCaptureFixture) -> None:
    memory = graph_memory.GraphMemory(100)
    for _ in memory.affordable([3, 2, 1], "graphs"):
        card.free -= GRAPH
    assert (memory.used, caplog.text) == (3 * GRAPH, "")


@pytest.mark.parametrize(
    ("added", "made"),
    [
        pytest.param([90, 0, 0, 0], [4, 3, 2, 1], id="the first has all that others need"),
        pytest.param([90, 30, 30, 30], [4, 3], id="each adds"),
        pytest.param([30, 30, 30, 30], [4, 3, 2], id="until it is spent"),
        pytest.param([90, 0, 30, 0], [4, 3, 2], id="until one adds"),
    ],
)
@ON_CPU
def test_none_is_left_out_for_nothing(
    added: list[int],
    made: list[int],
    card: Card,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They share a pool."""
    monkeypatch.setattr(graph_memory, "_LITTLE", 20)
    memory, found = graph_memory.GraphMemory(80), []
    for one in memory.affordable([4, 3, 2, 1], "graphs"):
        card.free -= added[len(found)]
        found.append(one)
    assert found == made
    left = ", ".join(map(str, range(4 - len(made), 0, -1)))
    assert (f"{MEMORY_SPENT}: no graphs of {left}" in caplog.text) == (len(made) < 4)


@ON_CPU
def test_so_do_other_forwards_and_drafts(
    card: Card, spec: SpecConfig, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are three, of whatever is needed first."""
    plain, llm = make(target, None), make(target, spec, device="cpu")
    monkeypatch.setattr(graph_cache, "capture", card.taken_by(capture_function))
    counters = graphs_on_the_cpu(llm)
    memory = llm.engine.parts.worker.runner.graph_memory
    memory.budget = 3 * GRAPH
    assert tokens(llm, [GREEDY]) == tokens(plain, [GREEDY])
    captures = {kind: one["captures"] for kind, one in counters.items()}
    assert sum(captures.values()) == 3
    assert tokens(llm, [GREEDY] * 3) == tokens(plain, [GREEDY] * 3)
    for kind, one in counters.items():
        assert one[f"fallback: {MEMORY_SPENT}"] > 3, kind
        assert one["captures"] == captures[kind]
    assert memory.used == memory.budget


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_the_gpu_nothing_is_captured_past_it(spec: SpecConfig, target: Path) -> None:
    plain = make(target, None, disable_cuda_graph=True)
    llm = make(target, spec, cuda_graph_bs=(1, 2, 4))
    memory, flying = llm.engine.parts.worker.runner.graph_memory, llm.engine.graph_round
    assert flying is not None
    memory.budget = used = memory.used
    forms, replays = set(flying.captured), flying.counters["replays"]
    assert used > 0
    for params in ([GREEDY] * 3, SAMPLED[:3], [GREEDY]):
        assert tokens(llm, params) == tokens(plain, params)
    assert set(flying.captured) == forms
    assert memory.used == used
    stats = llm.engine.stats().graphs["round"]
    assert stats.replays > replays + 6
    assert stats.fallbacks[MEMORY_SPENT] > 3, "there was none for those that sample"
