"""`train eagle3` for every family of targets: what it trains drafts in the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.config_sources import config_from_flags
from specengine.draft.train.data.dataset import TokenDataset
from specengine.draft.train.data.packing import PackedBatch
from specengine.draft.train.eagle3_task import Eagle3Config, Eagle3Task, make_eagle3_task
from specengine.engine.build import build_engine
from tests.support.families import FAMILIES, VOCAB
from tests.train.data_sets import random_dataset
from tests.train.draft_training import load_target, packed, random_documents

STEPS = 12
PROMPTS = [[5, 9, 4, 77], [100, 7, 31]]
PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    return random_dataset(tmp_path_factory.mktemp("data"), [40] * 30)


def trained(task: Eagle3Task, batch: PackedBatch) -> None:
    optimiser = torch.optim.AdamW(task.module.parameters(), lr=8e-3)
    for _ in range(STEPS):
        optimiser.zero_grad()
        task.loss(batch).loss.backward()
        optimiser.step()


def judged(task: Eagle3Task, batch: PackedBatch) -> tuple[float, float]:
    """The loss, and the share of first drafted tokens that stand."""
    found = task.summary(task.evaluate(batch))
    return found["loss"], found["acceptance_0"]


@pytest.mark.parametrize("family", FAMILIES)
def test_trained_draft_accepts_more_than_chance_and_serves(
    family: str, data: TokenDataset, small_models: dict[str, Path], tmp_path: Path
) -> None:
    flags = {"model": str(small_models[family]), "dtype": "float32", "device": "cpu"}
    loaded = load_target(small_models[family])
    torch.manual_seed(0)
    # The target runs once: its outputs are kept for the steps that follow.
    config = Eagle3Config(
        num_steps=2, chain_steps=2, draft_vocab_size=200, dtype="float32", feature_cache_mb=1
    )
    task = make_eagle3_task(loaded, data, config)
    # Weights are random, so that nothing is alike in other documents: it learns these by heart.
    batch = packed(random_documents([24] * 6, VOCAB, seed=1))
    loss_before, accepted_before = judged(task, batch)
    trained(task, batch)
    loss, accepted = judged(task, batch)
    assert loss < loss_before
    assert accepted > max(0.2, accepted_before)
    task.export(tmp_path)
    spec = SpecConfig(algorithm="EAGLE3", draft_model_path=str(tmp_path), adaptive=False)
    found = []
    for one in (None, spec):
        settings = config_from_flags({**flags, "max_total_tokens": 512}, one)
        llm = LLM.of(build_engine(settings, loaded))
        found.append([out.token_ids for out in llm.generate(PROMPTS, PARAMS)])
    assert found[0] == found[1]
    assert llm.engine.scheduler.spec_totals.num_draft_tokens > 0
