"""Graphs of long prompts are captured while there is no work, or when a second prompt of their size
comes; never at start."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specengine import LLM
from specengine.runner.fallbacks import NOT_CAPTURED
from specengine.runner.forward_graphs import prefill
from specengine.runner.forward_graphs.keys import PrefillKey
from specengine.runner.forward_graphs.prefill import PrefillGraphs
from tests.support.cpu_graphs import use_functions
from tests.support.device_rounds import run_on_device
from tests.support.plain import plain_says
from tests.support.rounds import GREEDY, ON_CPU, make

SMALL, *WIDE = (PrefillKey(size, 8, size) for size in (16, 32, 64))
NUM_LAYERS = 3

pytestmark = ON_CPU


@pytest.fixture
def llm(target: Path, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """With keys that are small enough for its context."""
    use_functions(monkeypatch)
    monkeypatch.setattr(prefill, "PREFILL_KEYS", (SMALL, *WIDE))
    monkeypatch.setattr(prefill, "WIDE_PREFILLS", tuple(WIDE))
    llm = make(target, None, disable_radix_cache=True)
    run_on_device(llm)
    runner = llm.engine.parts.worker.runner
    runner.prefill_graphs = PrefillGraphs(runner)
    runner.prefill_graphs.capture()
    return llm


def graphs_of(llm: LLM) -> PrefillGraphs:
    graphs = llm.engine.parts.worker.runner.prefill_graphs
    assert isinstance(graphs, PrefillGraphs)
    return graphs


def captured(llm: LLM) -> list[int]:
    return [key.tokens for key in graphs_of(llm).cache.captured]


def prompts(llm: LLM, *lengths: int) -> list[list[int]]:
    """Token ids, all different ones."""
    vocab_size = llm.engine.parts.worker.runner.model.vocab_size
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(5, vocab_size, (n,), generator=generator).tolist() for n in lengths]


def one_by_one(llm: LLM, given: list[list[int]]) -> list[list[int]]:
    """Each prompt in a forward of its own, while the requests before it run."""
    found: dict[str, list[int]] = {}
    left = list(enumerate(given))
    while left or llm.engine.has_work:
        if left and not llm.engine.scheduler.num_waiting:
            number, prompt = left.pop(0)
            llm.engine.add_request(str(number), prompt, GREEDY)
        found |= {one.rid: one.token_ids for one in llm.engine.step()}
        llm.engine.scheduler.check_invariant()
    return [found[str(number)] for number in range(len(given))]


def test_idle_moments_capture_the_largest_first(llm: LLM, target: Path) -> None:
    assert captured(llm) == [16], "at start"
    while llm.engine.use_idle_moment():
        pass
    assert captured(llm) == [16, 64, 32]
    given = prompts(llm, 33, 20, 50, 9)
    expected = [one.token_ids for one in plain_says(target, given, [GREEDY] * 4)]
    assert one_by_one(llm, given) == expected
    stats = llm.engine.stats().graphs["prefill"]
    assert (stats.captures, stats.replays, stats.fallbacks) == (3, 4, {})


def test_second_prompt_of_a_size_captures_amid_other_requests(llm: LLM, target: Path) -> None:
    """Without an idle moment. What the capture runs writes to the KV of none of them."""
    given = prompts(llm, 20, 21, 22, 40)
    expected = [one.token_ids for one in plain_says(target, given, [GREEDY] * 4)]
    assert one_by_one(llm, given) == expected
    assert captured(llm) == [16, 32]
    stats = llm.engine.stats().graphs["prefill"]
    assert stats.fallbacks == {NOT_CAPTURED: 2}, "the first of either size"
    assert stats.replays == 2
    given = prompts(llm, 17, 41, 23, 42)
    expected = [one.token_ids for one in plain_says(target, given, [GREEDY] * 4)]
    assert one_by_one(llm, given) == expected
    assert captured(llm) == [16, 32, 64]
    assert llm.engine.stats().graphs["prefill"].fallbacks == {NOT_CAPTURED: 2}


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
def test_capture_of_a_prompt_is_given_up_before_any_layer(
    layer: int, llm: LLM, target: Path
) -> None:
    given = prompts(llm, 20, 50)
    expected = [one.token_ids for one in plain_says(target, given, [GREEDY] * 2)]
    assert one_by_one(llm, given[:1]) == expected[:1]
    points = 0

    def is_wanted() -> bool:
        nonlocal points
        points += 1
        return points > layer

    while llm.engine.pipeline is not None and llm.engine.pipeline.has_in_flight:
        llm.engine.use_idle_moment()
    assert llm.engine.use_idle_moment(is_wanted=is_wanted), "there is more to do"
    assert points == layer + 1
    assert captured(llm) == [16]
    assert one_by_one(llm, given) == expected
    while llm.engine.use_idle_moment():
        pass
    assert captured(llm) == [16, 32, 64], "32 was captured for the second prompt"
    assert one_by_one(llm, given) == expected
