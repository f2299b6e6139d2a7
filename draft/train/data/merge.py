"""Several data sets of one target as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specengine.core.errors import DataError
from specengine.draft.train.data.dataset import Document, TokenDataset
from specengine.draft.train.data.writer import DatasetWriter, Part, count_documents


def merge_datasets(parts: Sequence[Path], directory: Path) -> TokenDataset:
    """Their documents one after another; one that was there before is left out and counted.
    Raises DataError where they are not of the same target."""
    datasets = [TokenDataset(part) for part in parts]
    first = datasets[0].manifest
    for dataset in datasets:
        if dataset.manifest.target != first.target:
            raise DataError(
                f"{dataset.files.directory} and {datasets[0].files.directory} are not of the same "
                "target, tokenizer and chat template; they cannot be joined"
            )
    made: dict[str, Any] = {
        "merged": [{"data_sha256": d.manifest.data_sha256, **d.manifest.made} for d in datasets]
    }
    writer = DatasetWriter(directory, first.target.vocab_size, made)
    for _ in writer.resume():  # an earlier attempt may have been interrupted
        pass
    seen: set[bytes] = set()
    for number, dataset in enumerate(datasets):
        new = _new_documents(dataset, seen)
        if number < writer.position:
            continue
        counts = Counter(dataset.manifest.counts)
        counts.update({"dropped: duplicate in the merger": len(dataset) - len(new)})
        counts.update(_difference(count_documents(new), counts))
        writer.append(Part(new, number + 1, +counts, np.zeros(0, dtype=np.uint64)))
    return writer.finish(first.target, first.seed, made)


def _new_documents(dataset: TokenDataset, seen: set[bytes]) -> list[Document]:
    new = []
    for document in dataset.documents:
        key = document.tokens.tobytes()
        if key not in seen:
            seen.add(key)
            new.append(document)
    return new


def _difference(wanted: dict[str, int], found: Counter[str]) -> dict[str, int]:
    return {name: count - found[name] for name, count in wanted.items()}
