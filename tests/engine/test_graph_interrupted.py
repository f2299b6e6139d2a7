"""Rounds and captures that are broken off, after which the engine goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specengine import SpecConfig
from tests.engine.flying_world import let_fly
from tests.engine.test_graph_round import GREEDY, PROMPTS, make


@pytest.mark.skipif(torch.cuda.is_available(), reason="fails where functions stand for graphs")
def test_the_rounds_after_it_read_what_was_decided(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run before a capture has taken a turn that no replay took."""
    (expected,) = make(target, None, disable_cuda_graph=True).generate(PROMPTS[:1], GREEDY)
    llm = make(target, None)
    flying = let_fly(llm, monkeypatch)
    llm.generate(PROMPTS[:1], GREEDY)

    def fail(run: Callable[[], object], pool: Any) -> Any:
        run()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("specengine.engine.graph_round.capture", fail)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY)
    (found,) = llm.generate(PROMPTS[:1], GREEDY)
    assert flying.counters["captures"] == 1
    assert found.token_ids == expected.token_ids


@pytest.mark.skipif(torch.cuda.is_available(), reason="fails where functions stand for graphs")
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("where", ["land", "launch"])
@pytest.mark.parametrize(
    ("name", "penalty"), [("plain", 0.5), ("NGRAM", 0.0), ("EAGLE3", 0.0), ("EAGLE3", 0.5)]
)
def test_a_round_that_nobody_read_is_flown_again(
    name: str,
    penalty: float,
    where: str,
    overlaps: bool,
    target: Path,
    drafters: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the one that followed it."""
    asked = replace(GREEDY, temperature=0.7, frequency_penalty=penalty, seed=3)
    expected = make(target, None, disable_cuda_graph=True).generate(PROMPTS, asked)
    given: dict[str, Any] = {"algorithm": name, "adaptive": False}
    given |= {"draft_model_path": drafters[name], "num_steps": 2} if name in drafters else {}
    llm = make(target, None if name == "plain" else SpecConfig(**given))
    flying = let_fly(llm, monkeypatch, overlaps=overlaps)
    calls, call = 0, flying.land if where == "land" else flying._fly

    def fails_now_and_then(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if where == "land" and calls % 3 == 0:
            raise KeyboardInterrupt
        done = call(*args)
        if where == "launch" and calls % 3 == 0:
            raise KeyboardInterrupt
        return done

    monkeypatch.setattr(flying, "land" if where == "land" else "_fly", fails_now_and_then)
    for number, prompt in enumerate(PROMPTS):
        llm.engine.add_request(str(number), llm.tokenizer.encode(prompt), asked)
    outputs: dict[str, list[int]] = {}
    num_lost = 0
    while llm.engine.has_work:
        try:
            outputs |= {one.rid: one.token_ids for one in llm.engine.step()}
        except KeyboardInterrupt:
            num_lost += 1
    assert num_lost > 2
    assert outputs == {str(n): one.token_ids for n, one in enumerate(expected)}
