"""Long prompts on streams of their own, in turns with rounds in graphs and beside them: the same
tokens, also where pages change hands amid a prompt."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from specengine import LLM, SpecConfig
from specengine.runner.split_streams import BesideRounds
from tests.engine.test_split_prefill import GREEDY, Arrivals, prompt, request, split_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SPECS = {
    "plain": None,
    "EAGLE3": SpecConfig(algorithm="EAGLE3", num_steps=3, adaptive=False),
    "NGRAM": SpecConfig(algorithm="NGRAM", num_draft_tokens=5, adaptive=False),
}
FLAGS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "max_total_tokens": 4096,
    "cuda_graph_bs": (1, 2, 4, 8),
    "disable_radix_cache": True,
}
ARRIVALS: Arrivals = {
    0: [("a", prompt(1, 7)), ("b", prompt(2, 11))],
    6: [("c", prompt(3, 300)), ("d", prompt(4, 250))],
    8: [("e", prompt(5, 200)), ("f", prompt(6, 5))],
}
SAMPLING = GREEDY.__class__(max_tokens=60, temperature=0.0, ignore_eos=True)


def play(llm: LLM, leaves: str | None = None) -> dict[str, list[int]]:
    """leaves: a request that is aborted as soon as its prompt is under way, or else has begun."""
    done, step, engine = dict[str, list[int]](), 0, llm.engine
    while engine.has_work or step <= max(ARRIVALS):
        for rid, ids in ARRIVALS.get(step, []):
            engine.add_request(rid, ids, SAMPLING)
        for one in engine.step():
            if one.finish_reason is not None:
                done[one.rid] = one.token_ids
        if leaves is not None and leaves in {choice.rid for choice in engine.choices.values()}:
            split = engine.scheduler.queues.split
            if llm.engine.split is None or request(llm, leaves) in split:
                engine.abort(leaves)
        engine.scheduler.check_invariant()
        step += 1
    done.pop(leaves or "", None)
    return done


SHARES: dict[str, tuple[float, ...]] = {
    "turns": (1.0,),
    "shares": (0.5, 0.76),
    "both": (0.5, 0.76, 1.0),
}


@pytest.mark.parametrize("way", SHARES)
@pytest.mark.parametrize("leaves", [None, "c"])
@pytest.mark.parametrize("name", SPECS)
def test_prompts_beside_rounds_change_no_token(name: str, leaves: str | None, way: str) -> None:
    whole = LLM("tiny", SPECS[name], **FLAGS)
    expected = play(whole)
    expected.pop(leaves or "", None)
    del whole
    flags = {**FLAGS, "pdmux_layers": 1, "pdmux_min_tokens": 64, "pdmux_sm_shares": SHARES[way]}
    llm = LLM("tiny", SPECS[name], **flags, enable_pdmux=True)
    split = split_of(llm)
    assert isinstance(split.streams, BesideRounds)
    for _ in range(3):
        assert play(llm, leaves) == expected
    assert way != "shares" or split.no_shares or split.counters["turns"] < split.counters["calls"]
    assert way == "shares" or split.counters["turns"] > 0
    assert way != "turns" or not (split.streams.shares or split.no_shares)
    assert split.counters["calls"] > split.counters["prefills"] > 0
    assert bool(split.counters["left"]) == (leaves is not None)
    if split.streams.shares:
        rounds = llm.engine.device_rounds
        assert rounds is not None
        assert any(key.share is not None for key in rounds.captured)
        assert not rounds.lanes.num_on_all
    assert llm.engine.stats().num_free_slots == llm.engine.stats().num_slots


def test_a_prompt_alone_waits_for_the_device_and_not_for_rounds() -> None:
    llm = LLM("tiny", None, **FLAGS, enable_pdmux=True, pdmux_min_tokens=64)
    llm.engine.add_request("x", prompt(3, 300), SAMPLING)
    start, steps = time.perf_counter(), 0
    while not llm.engine.step():
        steps += 1
    assert steps < 8
    assert time.perf_counter() - start < 5.0
