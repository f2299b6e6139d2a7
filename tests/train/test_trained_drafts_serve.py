"""From nothing to a served drafter: what evaluation promises, the engine measures."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from specengine import LLM, SamplingParams, SpecConfig
from specengine.draft.train.data.dataset import TokenDataset
from specengine.draft.train.data.packing import PackedBatch
from specengine.draft.train.eagle3_task import Eagle3Config, make_eagle3_task
from specengine.draft.train.mtp_task import MtpConfig, make_mtp_task
from specengine.draft.train.unrolled_task import UnrolledTask
from tests.train.data_sets import random_dataset
from tests.train.draft_training import load_target, packed, random_documents

CHAIN, NEW_TOKENS = 3, 48
PROMPTS = random_documents([3, 5, 4], 320, seed=11)
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)


def make_llm(target: Path, spec: SpecConfig | None = None) -> LLM:
    return LLM(str(target), spec, dtype="float32", max_total_tokens=1024)


@cache
def answered(target: Path) -> PackedBatch:
    """The target's greedy answers, which it would give again."""
    outs = make_llm(target).generate(PROMPTS, GREEDY)
    documents = [prompt + out.token_ids for prompt, out in zip(PROMPTS, outs, strict=True)]
    return packed(documents, [list(range(len(p), len(p) + NEW_TOKENS)) for p in PROMPTS])


def learn(task: UnrolledTask, batch: PackedBatch, steps: int) -> dict[str, float]:
    optimiser = torch.optim.AdamW(task.module.parameters(), lr=4e-3, weight_decay=0.0)
    for _ in range(steps):
        task.loss(batch).loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        optimiser.zero_grad()
    return task.summary(task.evaluate(batch))


@dataclass
class Served:
    length: float  # accepted length, the bonus token included
    first: float  # share of the first drafted tokens that stood


def served(target: Path, algorithm: str, draft: Path) -> Served:
    spec = SpecConfig(
        algorithm=algorithm, adaptive=False, draft_model_path=str(draft), num_steps=CHAIN
    )
    llm = make_llm(target, spec)
    llm.generate(PROMPTS, GREEDY)
    totals = llm.engine.scheduler.spec_totals
    length = 1 + totals.num_accepted_tokens / totals.num_drafts
    return Served(length, totals.accepted_per_pos[0] / totals.num_drafts)


def make(algorithm: str, target: Path, dataset: TokenDataset) -> UnrolledTask:
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "num_steps": 4,
        "chain_steps": CHAIN,
        "hard_cross_entropy": 1.0,
        "dtype": "float32",
    }
    loaded = load_target(target)
    if algorithm == "MTP":
        return make_mtp_task(loaded, MtpConfig(**options))
    return make_eagle3_task(loaded, dataset, Eagle3Config(**options))


@pytest.mark.parametrize("algorithm", ["EAGLE3", "MTP"])
def test_a_drafter_learns_and_serves_what_was_promised(
    algorithm: str, small_models: dict[str, Path], tmp_path: Path
) -> None:
    target = small_models["llama"]
    batch = answered(target)
    task = make(algorithm, target, random_dataset(tmp_path / "data", [40] * 30))
    assert task.summary(task.evaluate(batch))["acceptance_0"] < 0.2
    half = learn(task, batch, 14)
    assert 1.5 < half["accepted_length"] < 3.5
    check(half, served(target, algorithm, exported(task, tmp_path / "half")))
    whole = learn(task, batch, 30)
    assert whole["accepted_length"] > 3.7
    check(whole, served(target, algorithm, exported(task, tmp_path / "whole")))


def exported(task: UnrolledTask, folder: Path) -> Path:
    folder.mkdir()
    task.export(folder)
    return folder


def check(promised: dict[str, float], measured: Served) -> None:
    """The last round of an answer is cut short: its tokens are accepted, and not all are asked."""
    assert measured.length == pytest.approx(promised["accepted_length"], abs=0.1)
    assert measured.first == pytest.approx(promised["acceptance_0"], abs=0.02)
