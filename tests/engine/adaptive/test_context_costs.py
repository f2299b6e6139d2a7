"""What context adds to the cost of captured rounds, as measured at start."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specengine import LLM, SpecConfig
from specengine.engine import graph_build, round_seconds
from specengine.engine.adaptive.costs import ContextCost, StepCosts
from specengine.engine.graph_build import _context_cost, _measure
from specengine.engine.graph_round import GraphRound
from specengine.engine.round_form import RoundGraph
from specengine.engine.round_seconds import most_text, num_slots, standing
from tests.engine.flying_world import chain_of, let_fly
from tests.engine.test_graph_round import PROMPTS, make


@pytest.fixture
def flying(target: Path, drafters: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> GraphRound:
    """Of at most four requests."""
    llm = make(target, chain_of("EAGLE3", drafters), device="cpu")
    return let_fly(llm, monkeypatch)


@pytest.mark.parametrize("text", [40, 100])
def test_rounds_are_measured_with_requests_of_this_context(flying: GraphRound, text: int) -> None:
    table, rows_B, slots = flying.table, flying.rows[:4], 1024
    with standing(rows_B, table, flying.state, slots, text):
        assert rows_B.tolist() == [1, 2, 3, 4]
        assert flying.state.lens[:6].tolist() == [0, text, text, text, text, 0]
        named = table[1:5, : min(text + 16, table.shape[1])]
        assert named.min() > 0, "slot 0 belongs to no request"
        assert named.max() < slots
        assert len({*named[:3].flatten().tolist()}) == named[:3].numel(), (
            "each has its own, while there are any"
        )
        assert (named[:, 0] % 256 == 0).all(), "of whole pages"
    assert not rows_B.any()
    assert not table.any()
    assert not flying.state.lens.any()


def test_a_failed_measurement_leaves_no_request(flying: GraphRound) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        standing(flying.rows[:2], flying.table, flying.state, 1024, 40),
    ):
        raise ZeroDivisionError
    assert not flying.table.any()
    assert not flying.rows.any()


@pytest.mark.parametrize("slots", [0, 256, 511])
def test_a_pool_of_one_page_has_no_context_cost(
    flying: GraphRound, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_seconds, "num_slots", lambda flying: slots)
    assert most_text(flying) == max(slots // 256 * 256 - 256 - 64, 0)
    assert _context_cost(flying, StepCosts({1: {0: 1.0, 3: 2.0}})) is None


def test_context_cost_is_the_difference_to_rounds_without_context(
    flying: GraphRound, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int, int]] = []

    def seconds_of(size: int, steps: int, nodes: int | None = None, text: int = 0) -> float:
        asked.append((size, steps, text))
        return 1.0 + steps + text * size

    monkeypatch.setattr(flying, "seconds_of", seconds_of)
    monkeypatch.setattr(graph_build, "most_text", lambda flying: 150)
    flying.batch_sizes, flying.steps = [1, 2, 3, 4], [0, 3]
    table = _measure(flying)
    more = {size: {0: 150.0 * size, 3: 150.0 * size} for size in (1, 2, 4)}
    assert table.context_cost == ContextCost(150, more)
    assert asked[-6:] == [(size, steps, 150) for size in (4, 2, 1) for steps in (0, 3)]
    assert table.of(4, 3) == 4.0, "of requests of no text"
    flying.batch_sizes = [2, len(flying.table)]
    found = _context_cost(flying, StepCosts({2: {0: 1.0, 3: 4.0}}))
    assert found is not None
    assert list(found.seconds) == [2], "there are not as many rows of the others"


def test_replays_run_with_the_context_that_is_asked_for(
    flying: GraphRound, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []

    def least_seconds(graph: RoundGraph, replays: int) -> float:
        graph.replay()
        seen.append(flying.state.lens[:4].tolist())
        return 1.0

    monkeypatch.setattr(round_seconds, "least_seconds", least_seconds)
    assert flying.seconds_of(2, 3, text=40) == 1.0
    zero, first, second, third = seen[0]
    assert (zero, third) == (0, 0)
    assert first == second > 40, "a round has moved them on"
    flying.seconds_of(2, 3)
    assert seen[1][1:] == [0, 0, 0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnTheGpu:
    def test_long_contexts_take_longer_and_leave_nothing(self) -> None:
        spec = SpecConfig(algorithm="NGRAM", adaptive=True, num_draft_tokens=4)
        llm = LLM(
            "smollm2-shape",
            spec,
            load_format="dummy",
            max_total_tokens=400_000,
            cuda_graph_bs=(1, 64),
        )
        flying = llm.engine.graph_round
        assert flying is not None
        assert num_slots(flying) > 400_000
        text = min(4096, most_text(flying))
        short, long = (flying.seconds_of(64, 0, text=tokens) for tokens in (0, text))
        assert long > 1.3 * short
        assert not flying.table.any()
        assert not flying.state.lens[1:].any()

    def test_an_engine_generates_the_same_after_measuring(
        self, target: Path, drafters: dict[str, str]
    ) -> None:
        spec = SpecConfig(
            algorithm="EAGLE3", adaptive=True, num_steps=3, draft_model_path=drafters["EAGLE3"]
        )
        plain, llm = make(target, None), make(target, spec)
        assert llm.engine.flights is not None
        depths = llm.engine.flights.depths
        assert depths is not None
        assert isinstance(depths.costs, StepCosts)
        assert depths.costs.context_cost is not None
        told = [[one.token_ids for one in each.generate(PROMPTS)] for each in (plain, llm)]
        assert told[0] == told[1]
