"""When memory for graphs is spent, captured graphs still run, and no other is captured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.interruption import CaptureInterrupted
from specengine.engine import build
from specengine.engine.round.executor import RoundExecutor
from specengine.runner import graph_cache
from specengine.runner.fallbacks import MEMORY_SPENT, GraphStats
from specengine.runner.memory import graph_memory
from specengine.runner.memory.graph_memory import MOST_LAUNCHES
from tests.support.cpu_graphs import capture, graphs_on_the_cpu
from tests.support.device_rounds import run_again, run_on_device
from tests.support.rounds import GREEDY, ON_CPU, ON_GPU, PROMPTS, SAMPLED, make

GRAPH = 10  # bytes


@dataclass
class Card:
    """A GPU of which every capture takes 10 bytes."""

    free: int = 1000
    held: int = 0  # by this process's allocator

    def reads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        platform = SimpleNamespace(
            has_graphs=True,
            empty_cache=lambda: None,
            graph_pool=lambda: (0, 1),
            free_memory=lambda: self.free,
            held_memory=lambda: self.held,
        )
        for module in (build, graph_memory):
            monkeypatch.setattr(module, "platform_of", lambda _: platform)

    def holds(self, rounds: RoundExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
        """Rounds are captured on this GPU."""
        monkeypatch.setattr(
            graph_cache,
            "capture_parts",
            self.taken_by(lambda parts, *_: run_again(parts)),
        )
        rounds.record = rounds.cache.record_parts

    def taken_by(self, capture: Callable[..., Any]) -> Callable[..., Any]:
        def taking(run: Any, *given: Any) -> Any:
            self.free -= GRAPH
            return capture(run, *given)

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
def test_rounds_without_a_graph_run_on_the_host(
    card: Card, spec: SpecConfig, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One byte is left after the first graph, so that there is a second."""
    plain, llm = make(target, None), make(target, spec, device="cpu")
    rounds = run_on_device(llm)
    card.holds(rounds, monkeypatch)
    memory, on_host = rounds.runner.graph_memory, 0
    memory.budget = GRAPH + 1
    run = llm.engine.host_round.run

    def counted(*given: Any) -> Any:
        nonlocal on_host
        on_host += 1
        return run(*given)

    monkeypatch.setattr(llm.engine.host_round, "run", counted)
    for params, on_device in (
        ([GREEDY], True),
        ([GREEDY] * 2, True),  # spends the rest
        ([GREEDY] * 3, False),  # until so few are left that there is a graph
        ([SAMPLED[0]], False),
        ([GREEDY], True),
    ):
        before, replays = on_host, rounds.counters["replays"]
        assert tokens(llm, params) == tokens(plain, params)
        assert on_host == before if on_device else on_host > before + 3
        assert rounds.counters["replays"] > replays or not on_device
    assert memory.used == 2 * GRAPH
    assert [key.batch_size for key in rounds.captured] == [1, 2]
    stats = GraphStats.of(rounds.counters)
    assert stats.captures == 2
    assert stats.fallbacks == {MEMORY_SPENT: on_host}


@ON_CPU
def test_largest_batches_are_captured_first_at_start(
    card: Card,
    spec: SpecConfig,
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They serve smaller batches."""
    plain, llm = make(target, None), make(target, spec, device="cpu")
    rounds = run_on_device(llm)
    card.holds(rounds, monkeypatch)
    monkeypatch.setattr(graph_memory, "_LITTLE", 0)
    assert rounds.batch_sizes == [1, 2, 4]
    rounds.runner.graph_memory.budget = 2 * GRAPH
    rounds.capture()
    assert rounds.batch_sizes == [2, 4]
    assert f"{MEMORY_SPENT}: no round graphs of 1" in caplog.text
    assert tokens(llm, [GREEDY]) == tokens(plain, [GREEDY])
    assert {key.batch_size for key in rounds.captured} == {2, 4}
    assert rounds.counters["replays"] > 3
    assert rounds.runner.graph_memory.used == 2 * GRAPH


@ON_CPU
def test_all_are_captured_where_there_is_room(card: Card, caplog: pytest.LogCaptureFixture) -> None:
    memory = graph_memory.GraphMemory(100)
    for _ in memory.affordable([3, 2, 1], "graphs"):
        card.free -= GRAPH
    assert (memory.used, caplog.text) == (3 * GRAPH, "")


def interrupted(memory: graph_memory.GraphMemory, card: Card, taken: int) -> None:
    with memory.measured():
        card.free -= taken
        raise CaptureInterrupted


@ON_CPU
def test_what_a_capture_that_is_given_up_held_is_not_used(card: Card) -> None:
    """It is gone with the error, but for what is left: requests may interrupt captures for ever."""
    memory = graph_memory.GraphMemory(100)
    for _ in range(3):
        with pytest.raises(CaptureInterrupted):
            interrupted(memory, card, 90)
        card.free += 89
    assert not memory.is_spent
    with memory.measured():
        card.free -= GRAPH
    assert memory.used == GRAPH + 3


@ON_CPU
def test_what_failed_captures_leave_and_give_back_by_turns_does_not_add_up(card: Card) -> None:
    memory = graph_memory.GraphMemory(100)
    for left in (20, -20) * 10:
        with pytest.raises(CaptureInterrupted):
            interrupted(memory, card, left)
        assert 0 <= memory.used <= 20
    with memory.measured():
        card.free -= GRAPH
    assert memory.used == GRAPH
    with memory.measured():
        card.free -= GRAPH
    assert memory.used == 2 * GRAPH


@ON_CPU
@pytest.mark.parametrize(
    ("free", "held", "used"),
    [
        pytest.param(500, GRAPH, GRAPH, id="another process gives memory back"),
        pytest.param(-(8 << 30), GRAPH, GRAPH + MOST_LAUNCHES, id="another process takes memory"),
        pytest.param(-3 * GRAPH, GRAPH, 3 * GRAPH, id="the driver keeps launches"),
        pytest.param(7, -7, 0, id="this process gives memory back"),
    ],
)
def test_graphs_take_what_the_allocator_holds_and_launches_of_what_else_the_device_lacks(
    free: int, held: int, used: int, card: Card
) -> None:
    memory = graph_memory.GraphMemory(100)
    with memory.measured() as taken:
        card.free, card.held = card.free + free, card.held + held
        assert max(taken(), 0) == used
    assert memory.used == used


@ON_CPU
def test_memory_that_another_process_takes_during_captures_spends_no_budget(
    card: Card, caplog: pytest.LogCaptureFixture
) -> None:
    """Launches of four graphs are the most that it is taken for, however they are captured."""
    memory, found = graph_memory.GraphMemory(5 * MOST_LAUNCHES), []
    for one in memory.affordable([2, 1], "graphs"):
        with memory.measured():
            card.held += GRAPH
            card.free -= GRAPH + (2 << 30)
        found.append(one)
    with memory.measured():
        card.free -= 2 << 30
    assert found == [2, 1]
    assert memory.used == 4 * MOST_LAUNCHES + 2 * GRAPH
    assert (memory.is_spent, caplog.text) == (False, "")


@ON_CPU
def test_failed_captures_beside_another_process_spend_no_budget(card: Card) -> None:
    memory = graph_memory.GraphMemory(2 * MOST_LAUNCHES)
    for _ in range(20):
        with pytest.raises(CaptureInterrupted):
            interrupted(memory, card, 1 << 30)
    assert memory.used == MOST_LAUNCHES


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
def test_captures_end_when_the_pool_would_grow_past_the_budget(
    added: list[int],
    made: list[int],
    card: Card,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Graphs share a pool of memory."""
    monkeypatch.setattr(graph_memory, "_LITTLE", 20)
    memory, found = graph_memory.GraphMemory(80), []
    for one in memory.affordable([4, 3, 2, 1], "graphs"):
        card.free -= added[len(found)]
        found.append(one)
    assert found == made
    left = ", ".join(map(str, range(4 - len(made), 0, -1)))
    assert (f"{MEMORY_SPENT}: no graphs of {left}" in caplog.text) == (len(made) < 4)


@ON_CPU
def test_forwards_and_drafts_without_a_graph_run_without_one(
    card: Card, spec: SpecConfig, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room for three graphs, of whatever is needed first."""
    plain, llm = make(target, None), make(target, spec, device="cpu")
    monkeypatch.setattr(graph_cache, "capture", card.taken_by(capture))
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


@pytest.mark.parametrize("_", [pytest.param(None, marks=ON_GPU)])
def test_nothing_is_captured_past_the_budget(_: None, spec: SpecConfig, target: Path) -> None:
    plain = make(target, None, disable_cuda_graph=True)
    llm = make(target, spec, cuda_graph_bs=(1, 2, 4))
    memory, rounds = llm.engine.parts.worker.runner.graph_memory, llm.engine.device_rounds
    assert rounds is not None
    memory.budget = used = memory.used
    keys, replays = set(rounds.captured), rounds.counters["replays"]
    assert used > 0
    for params in ([GREEDY] * 3, SAMPLED[:3], [GREEDY]):
        assert tokens(llm, params) == tokens(plain, params)
    assert set(rounds.captured) == keys
    assert memory.used == used
    stats = llm.engine.stats().graphs["round"]
    assert stats.replays > replays + 6
    assert stats.fallbacks[MEMORY_SPENT] > 3, "there was no graph of rounds that sample"
