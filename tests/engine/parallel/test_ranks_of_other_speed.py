"""A rank that is late, early, or both by turns: no decision may depend on it, and nothing hang."""

from __future__ import annotations

import random
from typing import Any

import pytest

from specengine import SamplingParams, SpecConfig
from specengine.core.parallel import Link
from specengine.engine.loop import Engine
from specengine.engine.parallel.lead import LeadEngine
from tests.support.ranks import Group, told

TREE = SpecConfig(algorithm="EAGLE3", num_steps=3, eagle_topk=2, num_draft_tokens=6)
PROMPTS = [[*range(20, 26 + 2 * number), number] for number in range(6)]
FLAGS: dict[str, Any] = {"max_total_tokens": 64, "context_length": 90}  # evicts and retracts
PARAMS = [
    SamplingParams(max_tokens=20, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=18, temperature=0.8, seed=5, ignore_eos=True),
]


def come_and_go(engine: Engine, seed: int, repeats: int) -> None:
    """Requests that come at any time, some of which are given up; and idle moments between them, in
    which captures are given up."""
    draws = random.Random(seed)
    for number, prompt in enumerate(PROMPTS * repeats):
        engine.add_request(f"gone {number}", prompt, PARAMS[number % 2])
        for _ in range(draws.randrange(4)):
            engine.step()
        if draws.random() < 0.5:
            engine.abort(f"gone {draws.randrange(number + 1)}")
        if draws.random() < 0.3:
            engine.flush_cache()
        while draws.random() < 0.3 and engine.has_work:
            engine.step()
        if not engine.has_work:
            engine.use_idle_moment(True, lambda: draws.random() < 0.3)
    while engine.has_work:
        engine.step()
    while engine.use_idle_moment(True, lambda: draws.random() < 0.3):
        pass


def check(group: Group, late: int, repeats: int) -> None:
    one, several = group.pair(TREE, "device_by_turns", **FLAGS)
    assert isinstance(several.engine, LeadEngine)
    several.engine.call("tests.support.ranks:be_late_at_random", rank=late)
    come_and_go(several.engine, late, repeats)
    found = [told(llm.generate(PROMPTS[:4], PARAMS * 2)) for llm in (one, several)]
    several.engine.call("tests.support.ranks:be_on_time")
    assert tokens(found[0]) == tokens(found[1])
    assert several.engine.stats().num_retractions > 0
    several.engine.scheduler.check_invariant()


def test_ranks_decide_alike_when_one_is_late(link: Link) -> None:
    check(Group("tiny", 2, link), 1, 1)


@pytest.mark.slow
def test_ranks_decide_alike_when_either_is_late(link: Link) -> None:
    group = Group("tiny", 2, link)
    for late in (0, 1, 0, 1):
        check(group, late, 4)


def tokens(found: list[Any]) -> list[list[int]]:
    """How deep was drafted may differ: rank 0 chose by its clock."""
    return [ids for ids, *_ in found]
