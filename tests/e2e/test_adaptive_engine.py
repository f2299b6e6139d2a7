"""Depths that follow past rounds, through the real engine: no token changes whatever drafts and
however the depth goes up and down, and what was chosen can be seen."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.batch import ScheduleBatch
from specengine.core.errors import ConfigError
from specengine.core.spec import DraftProposal
from specengine.core.spec_stats import DepthChoice
from specengine.engine.adaptive.host_rounds import AdaptiveRound
from tests.e2e.test_spec_control import CASES, NEW_TOKENS, ONE_SHAPE_EACH, PROMPTS, Case, folders

__all__ = ["folders"]

NGRAM: dict[str, Any] = {"algorithm": "NGRAM", "ngram_min_match": 1, "num_draft_tokens": 6}


def make(folders: dict[str, Path], case: Case | None, **more: Any) -> LLM:
    """Rounds that the host runs, on any machine: graphs choose among their own depths, which
    tests/engine/test_pipeline.py looks at."""
    flags: dict[str, Any] = {
        "dtype": "float32",
        "max_total_tokens": 2048,
        "disable_cuda_graph": True,
    }
    if case is None:
        return LLM(str(folders["target"]), **flags)
    algorithm, options = case
    target = folders["MTP"] if algorithm == "MTP" else folders["target"]
    if algorithm in folders and algorithm != "MTP":
        options = {**options, "draft_model_path": str(folders[algorithm])}
    spec = SpecConfig(**{"algorithm": algorithm, "adaptive": True, **options, **more})
    return LLM(str(target), spec, **flags)


def run(llm: LLM, **params: Any) -> list[list[int]]:
    sampling = SamplingParams(
        **{"max_tokens": NEW_TOKENS, "temperature": 0.0, "ignore_eos": True, **params}
    )
    outputs = [one.token_ids for one in llm.generate(PROMPTS, sampling)]
    llm.engine.scheduler.check_invariant()
    return outputs


def adaptive_of(llm: LLM) -> AdaptiveRound:
    assert llm.engine.parts.adaptive is not None
    return llm.engine.parts.adaptive


def choose(llm: LLM, depth_of: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let depth_of decide. Gives the depths, as they are asked for."""
    chosen: list[int] = []

    def decide(batch_size: int) -> DepthChoice:
        chosen.append(depth_of())
        return DepthChoice(chosen[-1], "as the test says", None)

    monkeypatch.setattr(adaptive_of(llm).chooser, "choose", decide)
    return chosen


@pytest.fixture(scope="module")
def plain(folders: dict[str, Path]) -> list[list[int]]:
    return run(make(folders, None))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_depths_that_come_and_go_change_no_token(
    case: Case, folders: dict[str, Path], plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is drafted deeper than was chosen; after rounds without drafts, they stand again."""
    llm = make(folders, case)
    depths = random.Random(1)
    chosen = choose(llm, lambda: depths.choice([0, 0, 1, 2, 4]), monkeypatch)
    assert run(llm) == plain
    assert 0 in chosen
    assert max(chosen) == 4
    assert 0 < len(llm.engine.stats().spec.accepted_per_pos) <= 4


@ONE_SHAPE_EACH
def test_depth_0_leaves_the_drafter_alone(
    case: Case, folders: dict[str, Path], plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(folders, case)

    def refuse(batch: ScheduleBatch) -> DraftProposal:
        raise AssertionError("asked to draft")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.drafter, "draft", refuse)
        choose(llm, lambda: 0, patch)
        assert run(llm) == plain
    assert llm.engine.stats().spec.num_drafts == 0
    choose(llm, lambda: 1, monkeypatch)
    assert run(llm) == plain
    assert len(llm.engine.stats().spec.accepted_per_pos) == 1


def test_chains_are_drafted_no_deeper_than_they_are_verified(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(folders, ("EAGLE", {"num_steps": 4}))
    drafter, widths = llm.engine.drafter, set()
    draft = drafter.draft

    def watched(batch: ScheduleBatch) -> DraftProposal:
        proposal = draft(batch)
        widths.add(proposal.tokens.shape[1])
        return proposal

    monkeypatch.setattr(drafter, "draft", watched)
    choose(llm, lambda: 2, monkeypatch)
    run(llm)
    assert max(widths) == 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_left_to_itself_it_changes_no_token(
    temperature: float, folders: dict[str, Path], plain: list[list[int]]
) -> None:
    """Sampled text is that of its seed, whatever the clock says."""
    asks: dict[str, Any] = {"temperature": temperature, "seed": 5}
    expected = run(make(folders, None), **asks) if temperature else plain
    llm = make(folders, ("NGRAM", {k: v for k, v in NGRAM.items() if k != "algorithm"}))
    for _ in range(3):
        assert run(llm, **asks) == expected
    depth = llm.engine.stats().depth
    assert depth is not None
    assert 0 <= depth.num_steps <= 5
    assert depth.reason.startswith("batch ")  # few rounds of one size: perhaps still measuring
    assert ("acceptance" in depth.reason) == (depth.expected_gain is not None)


def test_a_table_decides_from_the_first_round(folders: dict[str, Path], tmp_path: Path) -> None:
    dear = tmp_path / "dear.json"
    dear.write_text(json.dumps({"seconds": {"1": {"0": 1.0, "5": 90.0}}}))
    llm = make(folders, ("NGRAM", {**NGRAM, "cost_table": str(dear)}))
    run(llm)
    stats = llm.engine.stats()
    assert stats.depth is not None
    assert (stats.depth.num_steps, stats.spec.num_drafts) == (0, 0)
    before = dear.read_text()
    llm.engine.close()
    assert dear.read_text() == before, "who wrote it by hand finds it as it was"
    with pytest.raises(ConfigError, match="--speculative-cost-table"):
        make(folders, ("NGRAM", {**NGRAM, "cost_table": str(tmp_path / "none" / "table")}))


@pytest.mark.parametrize(
    "fixed",
    [
        {"adaptive": False},
        {"verify": "target_only"},
        {"verify": "relaxed"},
    ],
    ids=str,
)
def test_where_depth_must_not_follow_the_clock(
    fixed: dict[str, Any], folders: dict[str, Path]
) -> None:
    """Other rules sample other tokens of a seed where other drafts were verified."""
    llm = make(folders, ("NGRAM", {**NGRAM, **fixed}))
    assert llm.engine.parts.adaptive is None
    assert llm.engine.stats().depth is None


def test_nobody_chooses_where_nobody_drafts(folders: dict[str, Path]) -> None:
    assert make(folders, None).engine.parts.adaptive is None


def test_rounds_that_somebody_looks_at_keep_their_depth(folders: dict[str, Path]) -> None:
    class Widths:
        def __init__(self) -> None:
            self.most = 0

        def record(self, batch: ScheduleBatch, proposal: DraftProposal, *_: Any) -> None:
            self.most = max(self.most, *proposal.num_nodes)

    llm, seen = make(folders, ("STANDALONE", {"num_steps": 3})), Widths()
    llm.engine.host_round.recorders.append(seen)
    run(llm)
    assert seen.most == 4
    assert llm.engine.stats().depth is None
