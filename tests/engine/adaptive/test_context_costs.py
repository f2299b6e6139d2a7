"""What rounds take to read the text of their requests, and what depth that makes the best."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from specengine import LLM, SpecConfig
from specengine.core.platform import Graph, Platform
from specengine.engine import pipeline_build
from specengine.engine.adaptive.costs import ContextCost, StepCosts
from specengine.engine.pipeline_build import _context_cost, _measure
from specengine.engine.round import timing
from specengine.engine.round.executor import RoundExecutor
from specengine.engine.round.timing import max_context, num_kv_slots, pretend_context, seconds_of
from tests.support.device_rounds import chain_of, run_on_device
from tests.support.rounds import PROMPTS, make


@pytest.fixture
def rounds(target: Path, drafters: dict[str, str]) -> RoundExecutor:
    """Rounds of at most four requests."""
    return run_on_device(make(target, chain_of("EAGLE3", drafters), device="cpu"))


@pytest.mark.parametrize("text", [0, 40, 100])
def test_pretended_requests_have_slots_of_their_own(rounds: RoundExecutor, text: int) -> None:
    table, rows_B, slots = rounds.table, rounds.rows[:4], 1024
    with pretend_context(rows_B, table, rounds.state, slots, text):
        assert rows_B.tolist() == [1, 2, 3, 4]
        assert rounds.state.lens[:6].tolist() == [0, text, text, text, text, 0]
        named = table[1:5, : min(text + 16, table.shape[1])]
        assert named.min() > 0, "slot 0 belongs to no request"
        assert named.max() < slots
        assert len({*named[:3].flatten().tolist()}) == named[:3].numel(), (
            "each has its own, while there are any"
        )
        assert (named[:, 0] % 256 == 0).all(), "of whole pages"
    assert not rows_B.any()
    assert not table.any()
    assert not rounds.state.lens.any()


def test_error_leaves_no_pretended_request_behind(rounds: RoundExecutor) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        pretend_context(rounds.rows[:2], rounds.table, rounds.state, 1024, 40),
    ):
        raise ZeroDivisionError
    assert not rounds.table.any()
    assert not rounds.rows.any()


@pytest.mark.parametrize("slots", [0, 256, 511])
def test_pool_of_one_page_holds_no_context(
    rounds: RoundExecutor, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "num_kv_slots", lambda rounds: slots)
    assert max_context(rounds) == max(slots // 256 * 256 - 256 - 64, 0)
    assert _context_cost(rounds, StepCosts({1: {0: 1.0, 3: 2.0}})) is None


def test_context_cost_is_what_rounds_take_longer(
    rounds: RoundExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int, int]] = []

    def seconds_of(
        rounds: RoundExecutor, size: int, steps: int, nodes: int | None = None, context: int = 0
    ) -> float:
        asked.append((size, steps, context))
        return 1.0 + steps + context * size

    monkeypatch.setattr(pipeline_build, "seconds_of", seconds_of)
    monkeypatch.setattr(pipeline_build, "max_context", lambda rounds: 150)
    rounds.batch_sizes, rounds.steps = [1, 2, 3, 4], [0, 3]
    table = _measure(rounds)
    more = {size: {0: 150.0 * size, 3: 150.0 * size} for size in (1, 2, 4)}
    assert table.context_cost == ContextCost(150, more)
    assert asked[-6:] == [(size, steps, 150) for size in (4, 2, 1) for steps in (0, 3)]
    assert table.of(4, 3) == 4.0, "of requests of no text"
    rounds.batch_sizes = [2, len(rounds.table)]
    found = _context_cost(rounds, StepCosts({2: {0: 1.0, 3: 4.0}}))
    assert found is not None
    assert list(found.seconds) == [2], "there are not as many rows of the others"


def test_timed_replays_have_requests_of_that_context(
    rounds: RoundExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, roots = list[list[int]](), list[list[int]]()

    def least_seconds(
        graph: Graph, replays: int, platform: Platform, before: Callable[[], None]
    ) -> float:
        before()
        roots.append(rounds.state.roots[1:3].tolist())
        graph.replay()
        seen.append(rounds.state.lens[:4].tolist())
        return 1.0

    monkeypatch.setattr(timing, "least_seconds", least_seconds)
    assert seconds_of(rounds, 2, 3, context=40) == 1.0
    zero, first, second, third = seen[0]
    assert (zero, third) == (0, 0)
    assert first == second > 40, "a round has moved them on"
    seconds_of(rounds, 2, 3)
    assert 0 < seen[1][1] <= 4, "without context"
    assert all(len({*tokens}) == 2 for tokens in roots), "other experts for other tokens"
    assert not rounds.state.lens.any()
    assert not rounds.state.roots.any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnTheGpu:
    def test_long_texts_take_longer_and_leave_nothing(self) -> None:
        spec = SpecConfig(algorithm="NGRAM", adaptive=True, num_draft_tokens=4)
        llm = LLM(
            "smollm2-shape",
            spec,
            load_format="dummy",
            max_total_tokens=400_000,
            cuda_graph_bs=(1, 64),
        )
        rounds = llm.engine.device_rounds
        assert rounds is not None
        assert num_kv_slots(rounds) > 400_000
        text = min(4096, max_context(rounds))
        short, long = (seconds_of(rounds, 64, 0, context=tokens) for tokens in (0, text))
        assert long > 1.3 * short
        assert not rounds.table.any()
        assert not rounds.state.lens[1:].any()

    def test_engine_has_the_same_text_after_it(
        self, target: Path, drafters: dict[str, str]
    ) -> None:
        spec = SpecConfig(
            algorithm="EAGLE3", adaptive=True, num_steps=3, draft_model_path=drafters["EAGLE3"]
        )
        plain, llm = make(target, None), make(target, spec)
        assert llm.engine.pipeline is not None
        depths = llm.engine.pipeline.depths.chooser
        assert depths is not None
        assert isinstance(depths.costs, StepCosts)
        assert depths.costs.context_cost is not None
        told = [[one.token_ids for one in each.generate(PROMPTS)] for each in (plain, llm)]
        assert told[0] == told[1]
