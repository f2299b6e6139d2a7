"""Rounds of the host, at the depth that is chosen for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specengine import SpecConfig
from specengine.draft.hybrid import HybridDrafter
from specengine.engine.adaptive.acceptance import Acceptance, HybridAcceptance, RoundObservation
from tests.engine.test_depth_in_results import GREEDY, PROMPTS, make, steer
from tests.support import hybrid

SPEC = SpecConfig(algorithm="NGRAM", ngram_min_match=1, num_draft_tokens=6)
SLOW = 0.05  # seconds


def test_observation_of_host_round_has_the_seconds_of_drafting(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seconds of a slow drafter in rounds with drafts; 0 in rounds without."""
    llm = make(target, SPEC)
    steered = steer(llm, lambda number: number % 2)
    observe, told = steered.observe, list[RoundObservation]()
    clock = [0.0]

    def now() -> float:
        clock[0] += 1e-6
        return clock[0]

    def keep(observation: RoundObservation) -> None:
        told.append(observation)
        observe(observation)

    draft = llm.engine.drafter.draft

    def slow(batch: Any) -> Any:
        clock[0] += SLOW
        return draft(batch)

    for module in ("round.host", "adaptive.host_rounds"):
        monkeypatch.setattr(f"specengine.engine.{module}.perf_counter", now)
    monkeypatch.setattr(steered, "observe", keep)
    monkeypatch.setattr(llm.engine.drafter, "draft", slow)
    llm.generate(PROMPTS[0], GREEDY)
    assert len(told) > 4
    for one in told:
        assert (one.drafting_seconds > SLOW) == (one.num_steps > 0)
        assert one.seconds is not None
        assert one.seconds > one.drafting_seconds


@pytest.mark.parametrize("topk", [1, 2])
@pytest.mark.parametrize("name", ["EAGLE3", "STANDALONE"])
def test_observation_of_hybrid_round_says_which_drafts_are_from_lookup(
    name: str,
    topk: int,
    folders: dict[str, tuple[Path, SpecConfig]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In chains and in trees."""
    folder, spec = folders[name]
    spec = hybrid.hybrid(spec, 12, adaptive=True, eagle_topk=topk)
    llm = hybrid.make(folder, spec)
    drafter = llm.engine.drafter
    assert isinstance(drafter, HybridDrafter)
    steered = steer(llm, lambda number: (11, 3, 2, 0)[number % 4])
    found, told = dict[Any, bool](), set[tuple[int, tuple[bool, ...]]]()
    match, observe = drafter._long_match, steered.observe

    def watched(req: Any) -> Any:
        draft = match(req)
        found[req.req_pool_idx] = draft is not None
        return draft

    def keep(one: RoundObservation) -> None:
        if one.num_steps:
            marks = one.from_lookup or [False] * one.batch_size
            assert marks == [*found.values()]
            told.add((one.num_steps, tuple(marks)))
            if topk == 1:
                pairs = zip(one.num_drafted, marks, strict=True)
                assert all(mark or count <= 3 for count, mark in pairs)
        else:
            assert one.from_lookup is None
        found.clear()
        observe(one)

    monkeypatch.setattr(drafter, "_long_match", watched)
    monkeypatch.setattr(steered, "observe", keep)
    llm.generate(hybrid.PROMPTS, hybrid.LONG)
    assert {steps for steps, _ in told} == {2, 3, 11}
    assert {any(marks) for _, marks in told} == {True, False}
    assert any(any(marks) and not all(marks) for _, marks in told)


@pytest.mark.parametrize(
    ("name", "expected"), [("EAGLE3", HybridAcceptance), ("NGRAM", Acceptance)]
)
def test_a_model_beside_lookup_is_learned_separately(
    name: str, expected: type, folders: dict[str, tuple[Path, SpecConfig]], target: Path
) -> None:
    """Two lookup drafters are one source."""
    folder, spec = folders.get(name, (target, SpecConfig(algorithm=name)))
    parts = hybrid.make(folder, hybrid.hybrid(spec, adaptive=True)).engine.parts
    assert parts.adaptive is not None
    acceptance = parts.adaptive.chooser.acceptance
    assert type(acceptance) is expected
    if isinstance(acceptance, HybridAcceptance):
        assert (acceptance.model.depth, acceptance.lookup.depth) == (3, 7)
