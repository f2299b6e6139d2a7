"""Rounds and captures that are broken off, after which the engine goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specengine import SpecConfig
from tests.halves import each_value
from tests.support.device_rounds import make_on_device
from tests.support.plain import plain_says
from tests.support.rounds import GREEDY, ON_CPU, PROMPTS, make


@ON_CPU
def test_rounds_after_a_failed_capture_read_what_was_decided(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run before a capture has taken a turn that no replay took."""
    (expected,) = make(target, None, disable_cuda_graph=True).generate(PROMPTS[:1], GREEDY)
    llm, rounds = make_on_device("cpu", target, None)
    llm.generate(PROMPTS[:1], GREEDY)

    def fail(parts: Any) -> Any:
        parts[0]()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rounds, "record", fail)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY)
    (found,) = llm.generate(PROMPTS[:1], GREEDY)
    assert rounds.counters["captures"] == 1
    assert found.token_ids == expected.token_ids


@ON_CPU
@pytest.mark.parametrize(
    ("name", "penalty", "where", "overlaps"),
    each_value(
        1,
        [("plain", 0.5), ("NGRAM", 0.0), ("EAGLE3", 0.0), ("EAGLE3", 0.5)],
        ["collect", "launch"],
        [False, True],
    ),
)
def test_round_whose_result_was_not_read_runs_again(
    name: str,
    penalty: float,
    where: str,
    overlaps: bool,
    target: Path,
    drafters: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the one that followed it."""
    params = replace(GREEDY, temperature=0.7, frequency_penalty=penalty, seed=3)
    expected = plain_says(target, PROMPTS, [params] * 3, disable_cuda_graph=True)
    given: dict[str, Any] = {"algorithm": name, "adaptive": False}
    given |= {"draft_model_path": drafters[name], "num_steps": 2} if name in drafters else {}
    spec = None if name == "plain" else SpecConfig(**given)
    llm, rounds = make_on_device("cpu", target, spec, overlaps)
    method = "collect" if where == "collect" else "_launch"
    calls, call = 0, getattr(rounds, method)

    def fail_every_third(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if where == "collect" and calls % 3 == 0:
            raise KeyboardInterrupt
        done = call(*args)
        if where == "launch" and calls % 3 == 0:
            raise KeyboardInterrupt
        return done

    monkeypatch.setattr(rounds, method, fail_every_third)
    for number, prompt in enumerate(PROMPTS):
        llm.engine.add_request(str(number), llm.tokenizer.encode(prompt), params)
    outputs: dict[str, list[int]] = {}
    num_lost = 0
    while llm.engine.has_work:
        try:
            outputs |= {one.rid: one.token_ids for one in llm.engine.step()}
        except KeyboardInterrupt:
            num_lost += 1
    assert num_lost > 2
    assert outputs == {str(n): one.token_ids for n, one in enumerate(expected)}
