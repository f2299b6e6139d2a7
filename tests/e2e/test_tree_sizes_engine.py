"""Trees of any size, through the real engine: no token changes, none is larger than was chosen, and
what smaller ones would have accepted is what they do accept."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from specengine import LLM, SamplingParams, SpecControl
from specengine.core.batch import ModelWorkerBatch, ScheduleBatch
from specengine.core.grammar import GrammarSpec
from specengine.core.spec import DraftProposal, VerifyResult
from specengine.core.spec_stats import DepthChoice, DraftShape
from specengine.engine.adaptive.acceptance import HybridAcceptance
from specengine.engine.draft_nodes import best_nodes
from tests.e2e.test_adaptive_engine import adaptive_of, make, run
from tests.e2e.test_spec_control import CASES, TREE, Case, folders

__all__ = ["folders"]

TREES = [(name, one) for name, one in CASES if {"eagle_topk", "suffix_branches"} & one.keys()]
UNRANKED = [(name, one) for name, one in CASES if "ngram_branches" in one]


@pytest.fixture(scope="module")
def plain(folders: dict[str, Path]) -> list[list[int]]:
    return run(make(folders, None))


class Seen:
    """What is verified, round by round, and the shape that was chosen for it."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rounds: list[tuple[DraftShape, DraftProposal]] = []
        steps, prepare = adaptive_of(llm).chooser, llm.engine.host_round.verifier.prepare
        rng, self.shape = random.Random(1), DraftShape(0)
        cut = [one for one in steps.shapes if one.num_nodes is not None]

        def choose(batch_size: int) -> DepthChoice:
            self.shape = rng.choice(rng.choice([cut, steps.shapes]))
            return DepthChoice(self.shape.num_steps, "drawn", None, self.shape.num_nodes)

        def watched(batch: ScheduleBatch, proposal: DraftProposal) -> ModelWorkerBatch:
            self.rounds.append((self.shape, proposal))
            return prepare(batch, proposal)

        monkeypatch.setattr(steps, "choose", choose)
        monkeypatch.setattr(llm.engine.host_round.verifier, "prepare", watched)


@pytest.mark.parametrize("case", [*TREES, *UNRANKED], ids=str)
def test_sizes_that_come_and_go_change_no_token(
    case: Case, folders: dict[str, Path], plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(folders, case)
    seen = Seen(llm, monkeypatch)
    assert run(llm) == plain
    cut = [(shape.num_nodes, one) for shape, one in seen.rounds if shape.num_nodes is not None]
    assert len(cut) > 4
    if case not in UNRANKED:
        assert all(max(one.num_nodes) <= size for size, one in cut)


@pytest.mark.parametrize("case", TREES, ids=str)
def test_what_smaller_trees_accept_is_known_from_whole_ones(
    case: Case, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are verified before each round of the whole one, which writes over what they leave."""
    llm = make(folders, case)
    inner, steps = llm.engine.host_round, adaptive_of(llm).chooser
    run_whole, draft, told = inner.run, inner.drafter.draft, []
    monkeypatch.setattr(steps, "choose", lambda _: DepthChoice(steps.steps[-1], "whole", None))

    def accepted(batch: ScheduleBatch, proposal: DraftProposal, size: int) -> list[int]:
        small = best_nodes(proposal, size)
        output = inner.worker.forward_batch_generation(inner.verifier.prepare(batch, small))
        return inner.verifier.accept(output, batch, small).num_accepted

    def watched(batch: ScheduleBatch, *limits: Any) -> VerifyResult:
        whole, sizes = draft(batch), [2, 3, 5, 8, 11]
        monkeypatch.setattr(inner.drafter, "draft", lambda _: whole)
        really = {size: accepted(batch, whole, size) for size in sizes}
        result = run_whole(batch, *limits)
        if whole.is_empty:
            return result
        assert result.path_ranks is not None
        assert [len(row) for row in result.path_ranks] == result.num_accepted
        for size in sizes:
            below = [sum(rank < size for rank in row) for row in result.path_ranks]
            assert below == really[size]
            told.append((below, result.num_accepted))
        return result

    monkeypatch.setattr(inner, "run", watched)
    run(llm)
    assert any(below != whole for below, whole in told), "some fell short of the whole tree"
    assert any(any(below) for below, _ in told)


@pytest.mark.parametrize("constrained", [False, True], ids=["free", "constrained"])
def test_left_to_itself_it_learns_of_sizes(
    constrained: bool, folders: dict[str, Path], plain: list[list[int]]
) -> None:
    llm = make(folders, ("EAGLE3", TREE))
    asks: dict[str, Any] = {"grammar": GrammarSpec.regex("[a-z ]{8,40}")} if constrained else {}
    expected = run(make(folders, None), **asks) if constrained else plain
    for _ in range(2):
        assert run(llm, **asks) == expected
    assert adaptive_of(llm).chooser.acceptance.has_ranks


@pytest.mark.parametrize("case", TREES, ids=str)
def test_a_request_that_limits_its_depth_teaches_nothing_of_deeper_places(
    case: Case, folders: dict[str, Path]
) -> None:
    """However many nodes its tree has at that depth."""
    llm = make(folders, case)
    shallow = SamplingParams(
        max_tokens=40, temperature=0.0, ignore_eos=True, speculative=SpecControl(num_steps=1)
    )
    llm.generate(["abcabcabcabc"] * 2, shallow)
    found = adaptive_of(llm).chooser.acceptance
    sources = [found.model, found.lookup] if isinstance(found, HybridAcceptance) else [found]
    places = [one.smallest.tried for one in sources]
    assert any(first > 0 for first, *_ in places)
    assert not any(any(deeper) for _, *deeper in places)
