"""Prompts that run a few layers at a time on two ranks: as many as rank 0 decides by its clock."""

from __future__ import annotations

from typing import Any

import pytest

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.parallel import Link
from specengine.engine.loop import Engine
from tests.support.ranks import Group

THIS = "tests.engine.parallel.test_split_prefill_on_ranks"
CHAIN = SpecConfig(algorithm="EAGLE3", num_steps=3, adaptive=False)
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, temperature=0.8, seed=5, ignore_eos=True)


def prompt(first: int, length: int) -> list[int]:
    return [(7 * i * i + 3 * i + first) % 3000 + 5 for i in range(length)]


# By step: what comes.
ARRIVALS: dict[int, list[tuple[str, list[int], SamplingParams]]] = {
    0: [("short", prompt(1, 7), GREEDY), ("other", prompt(2, 9), SAMPLED)],
    2: [("long", prompt(3, 70), GREEDY), ("sampled", prompt(4, 50), SAMPLED)],
    4: [("gone", prompt(5, 90), GREEDY), ("behind", prompt(3, 80), GREEDY)],
}


@pytest.fixture(scope="module")
def two(link: Link) -> Group:
    flags: dict[str, Any] = {"enable_pdmux": True, "pdmux_min_tokens": 24}
    return Group("tiny", 2, link, max_running_requests=8, **flags)


def decide_on_rank_0(engine: Engine) -> None:
    """Another rank that asks its own clock ends."""

    def fail(*given: Any) -> Any:
        raise AssertionError("decided by a rank that is not the first")

    assert engine.split is not None
    if engine.parts.link.communicator.rank:
        engine.split.policy.decide = fail  # type: ignore[method-assign]


def has_called(engine: Engine, counters: dict[str, int]) -> None:
    """Checked on every rank: one on which it does not hold ends."""
    assert engine.split is not None
    assert dict(engine.split.counters) == counters
    assert not engine.split.is_busy
    engine.scheduler.check_invariant()


def play(llm: LLM) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    step, engine = 0, llm.engine
    while engine.has_work or step <= max(ARRIVALS):
        for rid, ids, sampling in ARRIVALS.get(step, []):
            engine.add_request(rid, ids, sampling)
        if step == 6:
            engine.abort("gone")
        found |= {one.rid: one.token_ids for one in engine.step()}
        step += 1
    found.pop("gone", None)
    return found


@pytest.mark.parametrize("where", ["host", "device"])
def test_split_prompts_of_two_ranks_give_the_tokens_of_one(where: str, two: Group) -> None:
    one, several = two.pair(CHAIN, where)
    engine: Any = several.engine
    engine.call(f"{THIS}:decide_on_rank_0")
    assert play(several) == play(one)
    counters = dict(engine.split.counters)
    assert counters["prompts"] >= 3
    assert counters["calls"] > counters["prefills"], "some ran in several calls"
    engine.call(f"{THIS}:has_called", counters=counters)
