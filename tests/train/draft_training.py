"""What tests of draft training share: small targets, packed documents."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import torch

from specengine.core.config_sources import config_from_flags
from specengine.draft.train.data.packing import PackedBatch
from specengine.draft.train.documents import DraftRows
from specengine.draft.train.teacher import Teacher
from specengine.engine.build import load
from specengine.engine.phases import Phases
from specengine.runner.loader.loaded_model import LoadedModel


def load_target(directory: Path, **flags: Any) -> LoadedModel:
    settings = {"model": str(directory), "dtype": "float32", "device": "cpu", **flags}
    return load(config_from_flags(settings, None), Phases())


def packed(documents: list[list[int]], answers: list[list[int]] | None = None) -> PackedBatch:
    """answers: places of each document's answer tokens; all but the first by default."""
    lens = [len(document) for document in documents]
    chosen = answers or [list(range(1, length)) for length in lens]
    mask = [
        place in places
        for length, places in zip(lens, chosen, strict=True)
        for place in range(length)
    ]
    return PackedBatch(
        input_ids=torch.tensor(list(chain.from_iterable(documents))),
        positions=torch.cat([torch.arange(length) for length in lens]),
        document_ids=torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(lens)),
        lens=lens,
        loss_mask=torch.tensor(mask),
    )


def random_documents(lens: list[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    torch.manual_seed(seed)
    return [torch.randint(2, vocab_size, (length,)).tolist() for length in lens]


def rows_of(teacher: Teacher, batch: PackedBatch) -> DraftRows:
    output = teacher.forward(batch)
    return DraftRows.of(batch, output.features, output.hidden)


def small_task(kind: str, max_positions: int) -> list[str]:
    """Overrides of the section `task` with which any kind of drafter is small."""
    steps = ["task.num_steps=2", "task.chain_steps=2"]
    own = {
        "standalone": [
            "task.hidden_size=16", "task.num_layers=1", f"task.max_positions={max_positions}",
        ],
        "dflash": ["task.block_size=3", "task.num_layers=1", "task.anchors=16"],
    }  # fmt: skip
    return own.get(kind, steps)
