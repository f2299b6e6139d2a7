"""Small data sets for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from specengine.draft.train.data.dataset import Document, TokenDataset
from specengine.draft.train.data.manifest import TargetIdentity
from specengine.draft.train.data.writer import write_dataset

TARGET = TargetIdentity(
    name="small", weights="w" * 64, tokenizer="t" * 64, chat_template="c" * 64, vocab_size=320
)


def random_documents(lengths: Sequence[int], seed: int = 0) -> list[Document]:
    """Random tokens; the second half of each is the answer."""
    rng = np.random.default_rng(seed)
    return [
        Document(
            rng.integers(0, TARGET.vocab_size, size=length).astype(np.uint16),
            (np.arange(length) >= length // 2).astype(np.uint8),
        )
        for length in lengths
    ]


def random_dataset(directory: Path, lengths: Sequence[int], seed: int = 0) -> TokenDataset:
    return write_dataset(directory, random_documents(lengths, seed), TARGET)
