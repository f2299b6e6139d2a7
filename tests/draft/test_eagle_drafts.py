"""Drafts of EAGLE's family inside the real engine, against a plain reading of their equations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.batch import ScheduleBatch
from specengine.core.spec import DraftProposal
from specengine.draft.choice import DraftChoice
from specengine.draft.eagle.worker import EagleWorker
from tests.draft import eagle_checkpoints as checkpoints
from tests.draft.eagle_reading import EagleReading

STEPS = 3
PROMPTS = ["abcabcabcabcabc", "The quick brown fox", "x", "0123456789" * 4]
FORMS: dict[str, tuple[str, Callable[[Path, Path], Path]]] = {
    "eagle": ("EAGLE", lambda to, target: checkpoints.eagle(to, target)),
    "eagle, input norm": (
        "EAGLE",
        lambda to, target: checkpoints.eagle(to, target, input_norm=True),
    ),
    "eagle3": ("EAGLE3", lambda to, target: checkpoints.eagle3(to, target)),
    "eagle3, whole vocabulary": (
        "EAGLE3",
        lambda to, target: checkpoints.eagle3(to, target, draft_vocab=320),
    ),
    "eagle3.1": (
        "EAGLE3",
        lambda to, target: checkpoints.eagle3(to, target, fc_norm=True, norm_output=True),
    ),
    "speculators": (
        "EAGLE3",
        lambda to, target: checkpoints.eagle3(
            to, target, speculators=True, norm_before_residual=True, norm_before_fc=True
        ),
    ),
}


@dataclass
class Round:
    """What one round knew, and the logits that each level of its drafts was chosen from."""

    texts: list[list[int]]
    levels: list[Tensor] = field(default_factory=list)  # [B, V] each
    proposal: DraftProposal | None = None


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[Round]:
    """Every round that EAGLE's family drafts, in order."""
    seen: list[Round] = []
    draft, best = EagleWorker.draft, DraftChoice.best

    def watched_draft(self: EagleWorker, batch: ScheduleBatch) -> DraftProposal:
        seen.append(Round([req.token_ids for req in batch.reqs]))
        seen[-1].proposal = draft(self, batch)
        return seen[-1].proposal

    def watched_best(self: DraftChoice, logits_RV: Tensor, paths_RD: Tensor) -> Tensor:
        seen[-1].levels.append(logits_RV.clone())
        return best(self, logits_RV, paths_RD)

    monkeypatch.setattr(EagleWorker, "draft", watched_draft)
    monkeypatch.setattr(DraftChoice, "best", watched_best)
    return seen


def check(rounds: list[Round], reading: EagleReading) -> int:
    """Compares every draft; returns how many."""
    compared = 0
    for one in rounds:
        assert one.proposal is not None
        for i, (text, count) in enumerate(zip(one.texts, one.proposal.num_nodes, strict=True)):
            drafted = one.proposal.tokens[i, 1:count].tolist()
            if not drafted:
                continue
            expected = reading.logits(text, drafted[:-1])
            found = torch.stack([level[i] for level in one.levels[: count - 1]])
            assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5
            assert reading.target_ids[expected.argmax(-1)].tolist() == drafted
            compared += 1
    return compared


def make(target: Path, algorithm: str, draft: Path, **flags: Any) -> LLM:
    spec = SpecConfig(algorithm=algorithm, draft_model_path=str(draft), num_steps=STEPS)
    return LLM(str(target), spec, **{"dtype": "float32", "max_total_tokens": 2048, **flags})


def run(llm: LLM, prompts: list[str] = PROMPTS, new_tokens: int = 12) -> list[list[int]]:
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    return [one.token_ids for one in llm.generate(prompts, params)]


@pytest.mark.parametrize("form", FORMS)
def test_drafts_follow_the_equations(
    form: str, small_models: dict[str, Path], tmp_path: Path, rounds: list[Round]
) -> None:
    """Alone and in batches, over rounds."""
    algorithm, build = FORMS[form]
    target = small_models["llama"]
    draft = build(tmp_path / "draft", target)
    run(make(target, algorithm, draft))
    assert check(rounds, EagleReading(draft, target)) >= 30


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_whatever_way_the_text_came_in(
    algorithm: str,
    page_size: int,
    small_models: dict[str, Path],
    tmp_path: Path,
    rounds: list[Round],
) -> None:
    """In chunks, with requests riding along, found in the cache, and after retraction; with drafts
    of which some are accepted and some are not."""
    target = checkpoints.almost_bigram(tmp_path / "target", small_models["llama"], 0.03)
    if algorithm == "EAGLE":
        draft = checkpoints.oracle_eagle(tmp_path / "draft", target, noise=1.0)
    else:
        draft = checkpoints.oracle_eagle3(tmp_path / "draft", target, focus=20.0)
    reading = EagleReading(draft, target)
    chunks = {"chunked_prefill_size": 16, "enable_mixed_chunk": True, "page_size": page_size}
    llm = make(target, algorithm, draft, **chunks)
    first = run(llm)
    again = run(llm)
    assert first == again
    assert llm.engine.scheduler.num_cached_tokens > 40
    totals = llm.engine.scheduler.spec_totals
    assert 0 < totals.num_accepted_tokens < totals.num_draft_tokens
    assert check(rounds, reading) > 20

    rounds.clear()
    tight = make(target, algorithm, draft, page_size=page_size, max_total_tokens=208)
    tight.engine.scheduler.admission.demand.share = 0.0
    run(tight, [f"{i}{i}{i}" for i in range(8)], new_tokens=40)
    assert tight.engine.scheduler.num_retractions > 0
    assert check(rounds, reading) > 20
