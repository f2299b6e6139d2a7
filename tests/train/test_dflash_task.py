"""DFlash's training forward is the one that serving runs, and it learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.errors import ConfigError
from specengine.draft.train.dflash import Blocks
from specengine.draft.train.dflash_task import DFlashConfig, DFlashTask, make_dflash_task
from specengine.draft.train.documents import DraftRows
from tests.draft.dflash_reading import DFlashReading
from tests.train.data_sets import random_dataset
from tests.train.draft_training import load_target, packed, random_documents

VOCAB = 320


def make_task(target: Path, folder: Path, **options: Any) -> DFlashTask:
    torch.manual_seed(3)
    dataset = random_dataset(folder / "data", [40] * 30)
    settings = {"block_size": 4, "dtype": "float32", "decay": 4.0} | options
    return make_dflash_task(load_target(target), dataset, DFlashConfig(**settings))


def shake(task: DFlashTask) -> None:
    """Away from the initial values, some of which are ones and zeros."""
    with torch.no_grad():
        for parameter in task.module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


@pytest.mark.parametrize("options", [{}, {"num_layers": 1, "num_heads": 8, "num_kv_heads": 1}])
def test_every_block_is_what_serving_drafts(
    options: dict[str, Any], small_models: dict[str, Path], tmp_path: Path
) -> None:
    target = small_models["llama"]
    task = make_task(target, tmp_path, **options)
    shake(task)
    (tmp_path / "draft").mkdir()
    task.export(tmp_path / "draft")
    reading = DFlashReading(tmp_path / "draft", target)
    documents = random_documents([20, 7, 33], VOCAB)
    batch = packed(documents)
    output = task.teacher.forward(batch)
    rows = DraftRows.of(batch, output.features, output.hidden)
    anchors = [3, 11, 23, 28, 40, 50]  # of the first document, of the second, of the third
    blocks = Blocks.of(rows, torch.tensor(anchors), 4)
    head = task.module.borrowed.head
    assert head is not None
    with torch.no_grad():
        found_ADV = task.module(rows, blocks, lambda states: states[:, 1:] @ head.T)
    starts = [0, 20, 27]
    for anchor, found_DV in zip(anchors, found_ADV, strict=True):
        number = sum(anchor >= start for start in starts) - 1
        text = documents[number][: anchor - starts[number] + 1]
        expected = reading.logits(text, 3)
        assert float((found_DV - expected).abs().max()) < 1e-4 * float(expected.abs().max())


def test_draft_learns_and_its_evaluation_foretells_the_engine(
    small_models: dict[str, Path], tmp_path: Path
) -> None:
    """On greedy answers of the target, which it then says again."""
    target = small_models["llama"]
    prompts = random_documents([6] * 5, VOCAB)
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    flags: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 1024}
    answers = [one.token_ids for one in LLM(str(target), **flags).generate(prompts, params)]
    texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    batch = packed(texts, [list(range(6, 46))] * 5)
    task = make_task(target, tmp_path, soft_cross_entropy=0.0, hard_cross_entropy=1.0)
    before = task.summary(task.evaluate(batch))
    optimiser = torch.optim.AdamW(task.module.parameters(), lr=3e-3)
    for _ in range(30):
        optimiser.zero_grad()
        task.loss(batch).loss.backward()
        optimiser.step()
    after = task.summary(task.evaluate(batch))
    assert after["loss"] < 0.5 * before["loss"]
    assert after["accepted_length"] > before["accepted_length"] + 1.0
    (tmp_path / "draft").mkdir()
    task.export(tmp_path / "draft")
    draft = str(tmp_path / "draft")
    spec = SpecConfig(algorithm="DFLASH", draft_model_path=draft, num_steps=3, adaptive=False)
    llm = LLM(str(target), spec, **flags)
    assert [one.token_ids for one in llm.generate(prompts, params)] == answers
    totals = llm.engine.scheduler.spec_totals
    emitted = 1 + 3 * totals.num_accepted_tokens / totals.num_draft_tokens
    assert abs(emitted - after["accepted_length"]) < 0.5


def test_mask_past_the_vocabulary_is_refused(small_models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mask_token_id=320"):
        make_task(small_models["llama"], tmp_path, mask_token_id=320)
