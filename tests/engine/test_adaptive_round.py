"""Rounds of the host, at the depth that is chosen for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specengine import SpecConfig
from tests.engine.test_depth_in_results import GREEDY, PROMPTS, make, steer

SPEC = SpecConfig(algorithm="NGRAM", ngram_min_match=1, num_draft_tokens=6)
SLOW = 0.05  # seconds


def test_the_time_of_drafting_is_told_with_the_round(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a drafter that takes its time, and of rounds that ask it for nothing."""
    llm = make(target, SPEC)
    steered = steer(llm, lambda number: number % 2)
    observe, told = steered.observe, []
    clock = [0.0]

    def now() -> float:
        clock[0] += 1e-6
        return clock[0]

    def keep(batch_size: int, num_steps: int, *given: Any, **more: Any) -> None:
        told.append((num_steps, given[2], more["drafting"]))
        observe(batch_size, num_steps, *given, **more)

    draft = llm.engine.drafter.draft

    def slow(batch: Any) -> Any:
        clock[0] += SLOW
        return draft(batch)

    for module in ("round", "adaptive.round"):
        monkeypatch.setattr(f"specengine.engine.{module}.perf_counter", now)
    monkeypatch.setattr(steered, "observe", keep)
    monkeypatch.setattr(llm.engine.drafter, "draft", slow)
    llm.generate(PROMPTS[0], GREEDY)
    assert len(told) > 4
    for num_steps, seconds, drafting in told:
        assert (drafting > SLOW) == (num_steps > 0)
        assert seconds > drafting
