"""A cache of graphs captures a key once, within the budget, and counts what it does."""

from __future__ import annotations

import logging
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from specengine.core.errors import GraphInputError
from specengine.core.platform import Graph
from specengine.runner.fallbacks import MEMORY_SPENT, GraphStats
from specengine.runner.graph_cache import GraphCache
from specengine.runner.graph_guard import GraphGuard, inputs_of
from specengine.runner.memory.graph_memory import GraphMemory
from tests.support.cpu_graphs import use_functions


class Key(NamedTuple):
    size: int
    doubled: bool = False


class Doubler:
    """Owner of a cache whose graphs write `factor` times their input."""

    def __init__(self, budget: int | None = None) -> None:
        self.factor = torch.tensor(2)
        self.cache = GraphCache[Key, list[Tensor]]("doubling", GraphMemory(budget), self.guard_of)
        self.made: list[Key] = []

    def guard_of(self, buffers: list[Tensor]) -> GraphGuard:
        return GraphGuard(lambda: inputs_of({"owner.factor": self.factor, "buffers": buffers}))

    def make(self, key: Key) -> tuple[Graph, list[Tensor]]:
        self.made.append(key)
        given, found = torch.ones(key.size), torch.zeros(key.size)

        def run() -> None:
            torch.mul(given, self.factor, out=found)

        graph, _ = self.cache.record(run)
        return graph, [given, found]


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    use_functions(monkeypatch)


def test_key_is_captured_once_and_replayed_on_its_buffers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    owner = Doubler()
    for value in (3, 5):
        with caplog.at_level(logging.INFO):
            captured = owner.cache.get(Key(4), owner.make)
        given, found = captured.buffers
        given.fill_(value)
        owner.cache.replay(captured)
        assert found.tolist() == [2 * value] * 4
    assert owner.made == [Key(4)]
    assert len(caplog.records) == 1
    assert caplog.text.count("captured a doubling graph in") == 1
    assert GraphStats.of(owner.cache.counters) == GraphStats(captures=1, replays=2)


def test_spent_budget_keeps_captured_keys_alone() -> None:
    budget = 2**40  # more than the first graph takes on any device
    owner = Doubler(budget)
    owner.cache.get(Key(1), owner.make)
    assert owner.cache.has_memory_for(Key(1), Key(2))
    owner.cache.memory.used = budget
    assert owner.cache.has_memory_for(Key(1))
    assert not owner.cache.has_memory_for(Key(1), Key(2))
    owner.cache.count_fallback(MEMORY_SPENT)
    assert GraphStats.of(owner.cache.counters).fallbacks == {MEMORY_SPENT: 1}


def test_capture_at_start_takes_all_keys_of_every_size_in_order() -> None:
    owner = Doubler()
    done = owner.cache.capture_at_start(
        [4, 1], lambda size: [Key(size), Key(size, doubled=True)], owner.make
    )
    assert done == [4, 1]
    assert owner.made == [*owner.cache.captured] == [Key(4), Key(4, True), Key(1), Key(1, True)]
    assert owner.cache.counters["captures"] == 4


def test_replay_refuses_an_owner_tensor_that_moved() -> None:
    owner = Doubler()
    captured = owner.cache.get(Key(2), owner.make)
    owner.cache.replay(captured)
    owner.factor = torch.tensor(2)
    with pytest.raises(GraphInputError, match=r"captured with owner\.factor at"):
        owner.cache.replay(captured)
    assert owner.cache.counters["replays"] == 1


def test_failed_capture_leaves_no_entry() -> None:
    owner = Doubler()

    def fail(key: Key) -> tuple[Graph, list[Tensor]]:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        owner.cache.get(Key(2), fail)
    assert not owner.cache.captured
    assert not owner.cache.counters
    owner.cache.get(Key(2), owner.make)
    assert owner.cache.counters["captures"] == 1
