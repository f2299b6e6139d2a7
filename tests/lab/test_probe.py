"""Prompts that drafters are measured on while they are trained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from specengine.core.errors import DataError
from specengine.draft.train.data.dataset import Document, TokenDataset
from specengine.draft.train.data.writer import write_dataset
from specengine.lab.probe import ProbePrompt, probe_prompts
from tests.train.data_sets import TARGET


def dataset_of(directory: Path, *masks: list[int]) -> TokenDataset:
    documents = [
        Document(np.arange(len(mask), dtype=np.uint16), np.array(mask, dtype=np.uint8))
        for mask in masks
    ]
    return write_dataset(directory, documents, TARGET)


def test_prompts_end_where_the_first_answer_begins(tmp_path: Path) -> None:
    masks = ([0, 0, 1, 1, 1, 0, 0, 1], [0, 0], [1, 1, 0], [0, 1], [0, 0, 0, 1])
    dataset = dataset_of(tmp_path, *masks)
    assert probe_prompts(dataset, 2, 100) == [ProbePrompt([0, 1], 3), ProbePrompt([0], 1)]
    assert probe_prompts(dataset, 9, 2)[0] == ProbePrompt([0, 1], 2)


def test_documents_without_answers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no held-out document has an answer"):
        probe_prompts(dataset_of(tmp_path, [0, 0], [1, 0]), 4, 10)
