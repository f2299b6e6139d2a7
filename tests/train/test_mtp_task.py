"""An MTP layer's training forward is the one that serving runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specengine.core.errors import ConfigError
from specengine.draft.mtp.checkpoint import find_layers
from specengine.draft.train.attention import PaddedAttention
from specengine.draft.train.mtp_task import MtpConfig, MtpTask, make_mtp_task
from tests.draft.mtp_reading import Reading
from tests.train.draft_training import load_target, packed, random_documents, rows_of

VOCAB = 320


def make_task(target: Path, **options: Any) -> MtpTask:
    torch.manual_seed(3)
    settings: dict[str, Any] = {"num_steps": 3, "dtype": "float32"} | options
    task = make_mtp_task(load_target(target), MtpConfig(**settings))
    with torch.no_grad():
        for parameter in task.module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return task


@torch.no_grad()
def step_logits(task: MtpTask, documents: list[list[int]]) -> list[Tensor]:
    rows = rows_of(task.teacher, packed(documents))
    found: list[Tensor] = task.module(
        rows,
        PaddedAttention(rows),
        task.config.num_steps,
        lambda states, head: [state @ head.T for state in states],
    )
    return found


def expected_logits(reading: Reading, document: list[int], row: int, steps: int) -> list[Tensor]:
    """The layer again and again: rows up to `row` on the target's states, then one row a step on
    the state before, at the next place, which sees all of them."""
    hidden = reading.hidden(document)
    inputs, tokens = hidden[: row + 1], document[1 : row + 2]
    logits = []
    for step in range(steps):
        states = reading.deepseek(tokens, inputs, 0)
        logits.append(reading.mtp_head("deepseek", states[-1:])[0])
        if row + step + 2 >= len(document):
            break
        inputs = torch.cat([inputs, states[-1:]])
        tokens = [*tokens, document[row + step + 2]]
    return logits


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_every_step_is_the_layer_that_often(
    family: str, small_models: dict[str, Path], tmp_path: Path
) -> None:
    target = small_models[family]
    task = make_task(target)
    folder = tmp_path / "draft"
    folder.mkdir()
    task.export(folder)
    assert [layer.layer_id for layer in find_layers(folder, 64)] == [3]
    reading = Reading.of(target)
    reading.weights |= Reading.of(folder).weights
    documents = random_documents([10, 8], VOCAB, seed=4)
    found = step_logits(task, documents)
    start = 0
    for document in documents:
        for row in range(len(document) - 1):
            for step, logits in enumerate(expected_logits(reading, document, row, len(found))):
                largest = max(1.0, float(logits.abs().max()))
                assert float((found[step][start + row] - logits).abs().max()) < 2e-5 * largest
        start += len(document)


def test_a_target_with_a_window_is_refused(small_models: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="sliding window"):
        make_task(small_models["mistral"])
