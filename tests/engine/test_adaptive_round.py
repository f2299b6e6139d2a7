"""Rounds of the host, at the depth that is chosen for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specengine import SpecConfig
from specengine.draft.hybrid import HybridDrafter
from specengine.engine.adaptive.acceptance import Acceptance, HybridAcceptance
from tests.engine import hybrid_world
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


@pytest.mark.parametrize("topk", [1, 2])
@pytest.mark.parametrize("name", ["EAGLE3", "STANDALONE"])
def test_whose_drafts_they_were_is_told_beside_what_stood(
    name: str,
    topk: int,
    folders: dict[str, tuple[Path, SpecConfig]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model's beside those of text; trees, too."""
    folder, spec = folders[name]
    spec = hybrid_world.hybrid(spec, 12, adaptive=True, eagle_topk=topk)
    llm = hybrid_world.make(folder, spec)
    drafter = llm.engine.drafter
    assert isinstance(drafter, HybridDrafter)
    steered = steer(llm, lambda number: (11, 3, 2, 0)[number % 4])
    found, told = dict[Any, bool](), set[tuple[int, tuple[bool, ...]]]()
    match, observe = drafter._long_match, steered.observe

    def watched(req: Any) -> Any:
        draft = match(req)
        found[req.req_pool_idx] = draft is not None
        return draft

    def keep(batch_size: int, num_steps: int, drafted: Any, *given: Any, **more: Any) -> None:
        if num_steps:
            of_text = more["of_text"] or [False] * batch_size
            assert of_text == [*found.values()]
            told.add((num_steps, tuple(of_text)))
            if topk == 1:
                assert all(mark or count <= 3 for count, mark in zip(drafted, of_text, strict=True))
        else:
            assert more["of_text"] is None
        found.clear()
        observe(batch_size, num_steps, drafted, *given, **more)

    monkeypatch.setattr(drafter, "_long_match", watched)
    monkeypatch.setattr(steered, "observe", keep)
    llm.generate(hybrid_world.PROMPTS, hybrid_world.LONG)
    assert {steps for steps, _ in told} == {2, 3, 11}
    assert {any(marks) for _, marks in told} == {True, False}
    assert any(any(marks) and not all(marks) for _, marks in told)


@pytest.mark.parametrize(
    ("name", "expected"), [("EAGLE3", HybridAcceptance), ("NGRAM", Acceptance)]
)
def test_two_sources_are_learned_apart(
    name: str, expected: type, folders: dict[str, tuple[Path, SpecConfig]], target: Path
) -> None:
    """Of a model and of text; text beside text is all text."""
    folder, spec = folders.get(name, (target, SpecConfig(algorithm=name)))
    parts = hybrid_world.make(folder, hybrid_world.hybrid(spec, adaptive=True)).engine.parts
    assert parts.adaptive is not None
    acceptance = parts.adaptive.steps.acceptance
    assert type(acceptance) is expected
    if isinstance(acceptance, HybridAcceptance):
        assert (acceptance.model.depth, acceptance.text.depth) == (3, 7)
