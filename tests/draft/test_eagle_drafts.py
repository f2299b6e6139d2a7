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
from specengine.draft.choice import Chosen, DraftChoice
from specengine.draft.eagle.worker import EagleWorker
from tests.draft import eagle_checkpoints as checkpoints
from tests.draft.eagle_reading import EagleReading
from tests.halves import each_value, slow_but

STEPS = 3
# The reading runs on the CPU; a GPU sums float32 in another order, and its tensor cores round more.
TOLERANCE = 1e-4 if torch.cuda.is_available() else 1e-5
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
    "speculators, three layers, one with a window": (
        "EAGLE3",
        lambda to, target: checkpoints.eagle3(
            to,
            target,
            speculators=True,
            norm_before_residual=True,
            layer={
                "num_hidden_layers": 3,
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
                "sliding_window": 5,
            },
        ),
    ),
    "eagle3 of the last state": ("EAGLE3", checkpoints.eagle3_of_last_state),
    "speculators' eagle": (
        "EAGLE",
        lambda to, target: checkpoints.speculators_eagle(to, target, layernorms=False, bias=False),
    ),
    "speculators' eagle, layernorms and bias": (
        "EAGLE",
        lambda to, target: checkpoints.speculators_eagle(to, target, layernorms=True, bias=True),
    ),
}


@dataclass
class Level:
    """What the children of each row were chosen from, and which they are."""

    logits_RV: Tensor
    paths_RD: Tensor
    tokens_RK: Tensor


@dataclass
class Round:
    """What one round knew, each level of its drafts, and what became of them."""

    texts: list[list[int]]
    depths: list[int]
    levels: list[Level] = field(default_factory=list)
    proposal: DraftProposal | None = None


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[Round]:
    """Every round that EAGLE's family drafts, in order."""
    seen: list[Round] = []
    draft, best, children = EagleWorker.draft, DraftChoice.best, DraftChoice.children

    def watched_draft(self: EagleWorker, batch: ScheduleBatch) -> DraftProposal:
        depths = [self.levels(req) for req in batch.reqs]
        seen.append(Round([req.token_ids for req in batch.reqs], depths))
        seen[-1].proposal = draft(self, batch)
        return seen[-1].proposal

    def note(logits_RV: Tensor, paths_RD: Tensor, tokens_RK: Tensor) -> None:
        columns = (logits_RV.cpu().clone(), paths_RD.cpu(), tokens_RK.cpu())
        seen[-1].levels.append(Level(*columns))

    def watched_best(self: DraftChoice, logits_RV: Tensor, paths_RD: Tensor) -> Tensor:
        tokens_R = best(self, logits_RV, paths_RD)
        note(logits_RV, paths_RD, tokens_R[:, None])
        return tokens_R

    def watched_children(
        self: DraftChoice, logits_RV: Tensor, paths_RD: Tensor, count: int, first_node: int
    ) -> Chosen:
        chosen = children(self, logits_RV, paths_RD, count, first_node)
        note(logits_RV, paths_RD, chosen.tokens_RK)
        return chosen

    monkeypatch.setattr(EagleWorker, "draft", watched_draft)
    monkeypatch.setattr(DraftChoice, "best", watched_best)
    monkeypatch.setattr(DraftChoice, "children", watched_children)
    return seen


def check(rounds: list[Round], reading: EagleReading) -> int:
    """Compares the logits after every node that was looked at, and the target's tokens that were
    chosen by them; returns how many."""
    compared = 0
    reading.read(text for one in rounds for text in one.texts)
    for one in rounds:
        drafted = paths_of(one)
        for depth, level in enumerate(one.levels):
            per_request = len(level.logits_RV) // len(one.texts)
            rows = zip(level.logits_RV, level.paths_RD.tolist(), level.tokens_RK, strict=True)
            for row, (found, path, tokens) in enumerate(rows):
                request = row // per_request
                if depth >= one.depths[request]:
                    continue
                expected = reading.logits(one.texts[request], path)[-1]
                largest = max(1.0, float(expected.abs().max()))
                assert float((found - expected).abs().max()) < TOLERANCE * largest
                best = reading.target_ids[found.topk(len(tokens)).indices]
                assert tokens.tolist() == best.tolist()
                drafted[request] -= {(*path, token) for token in tokens.tolist()}
                compared += 1
        assert not any(drafted), "verified, and chosen after no node"
    return compared


def paths_of(one: Round) -> list[set[tuple[int, ...]]]:
    """The tokens from the root's child down to each node that is to be verified, by request."""
    if one.proposal is None or one.proposal.is_empty:
        return []
    found = []
    for tokens, parents, count in zip(
        one.proposal.tokens.tolist(),
        one.proposal.parents.tolist(),
        one.proposal.num_nodes,
        strict=True,
    ):
        paths: list[tuple[int, ...]] = [()]
        for node in range(1, count):
            paths.append((*paths[parents[node]], tokens[node]))
        found.append(set(paths[1:]))
    return found


def make(target: Path, algorithm: str, draft: Path, topk: int, **flags: Any) -> LLM:
    spec = SpecConfig(
        algorithm=algorithm,
        draft_model_path=str(draft),
        num_steps=STEPS,
        adaptive=False,
        eagle_topk=topk,
    )
    # A replayed graph calls nothing that could be watched.
    always = {"dtype": "float32", "max_total_tokens": 2048, "disable_cuda_graph": True}
    return LLM(str(target), spec, **(always | flags))


def run(llm: LLM, prompts: list[str] = PROMPTS, new_tokens: int = 12) -> list[list[int]]:
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    return [one.token_ids for one in llm.generate(prompts, params)]


@pytest.mark.parametrize(("form", "topk"), each_value(1, FORMS, [1, 2]))
def test_drafts_follow_the_equations(
    form: str, topk: int, small_models: dict[str, Path], tmp_path: Path, rounds: list[Round]
) -> None:
    """In batches and over rounds; each form with the other `topk` in make test-all."""
    algorithm, build = FORMS[form]
    target = small_models["llama"]
    draft = build(tmp_path / "draft", target)
    run(make(target, algorithm, draft, topk), new_tokens=8)
    assert check(rounds, EagleReading(draft, target)) >= 50


@pytest.mark.parametrize(
    ("algorithm", "topk", "page_size"),
    slow_but(
        [("EAGLE", 1, 16), ("EAGLE3", 2, 1)],
        [(one, *two) for one in ("EAGLE", "EAGLE3") for two in ((1, 16), (1, 1), (2, 1))],
    ),
)
def test_whatever_way_the_text_came_in(
    algorithm: str,
    topk: int,
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
    llm = make(target, algorithm, draft, topk, **chunks)
    assert run(llm) == run(llm)
    assert llm.engine.scheduler.num_cached_tokens > 40
    totals = llm.engine.scheduler.spec_totals
    assert 0 < totals.num_accepted_tokens < totals.num_draft_tokens
    assert check(rounds, reading) > 60

    rounds.clear()
    tight = make(target, algorithm, draft, topk, page_size=page_size, max_total_tokens=208)
    tight.engine.scheduler.admission.demand.share = 0.0
    run(tight, [f"{i}{i}{i}" for i in range(8)], new_tokens=40)
    assert tight.engine.scheduler.num_retractions > 0
    assert check(rounds[-20:], reading) > 60
