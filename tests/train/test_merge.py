from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specengine.core.errors import DataError
from specengine.draft.train.data.dataset import TokenDataset
from specengine.draft.train.data.merge import merge_datasets
from specengine.draft.train.data.writer import DatasetWriter, write_dataset
from tests.train.data_sets import TARGET, random_documents


def test_equal_documents_count_once(tmp_path: Path) -> None:
    one, two = random_documents([3, 4, 5], seed=1), random_documents([6, 7], seed=2)
    write_dataset(tmp_path / "a", one, TARGET)
    write_dataset(tmp_path / "b", [one[1], *two], TARGET)
    merged = merge_datasets([tmp_path / "a", tmp_path / "b"], tmp_path / "c")
    assert merged.lengths.tolist() == [3, 4, 5, 6, 7]
    counts = TokenDataset(tmp_path / "c").manifest.counts
    assert counts["documents"] == 5
    assert counts["tokens"] == 25
    assert counts["answer_tokens"] == int(merged.files.loss.sum())
    assert counts["dropped: duplicate in the merger"] == 1
    sources = [one["data_sha256"] for one in merged.manifest.made["merged"]]
    assert sources[0] == TokenDataset(tmp_path / "a").manifest.data_sha256
    assert len(set(sources)) == 2


def test_an_interrupted_merger_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed, name in enumerate("abc"):
        write_dataset(tmp_path / name, random_documents([3, 4 + seed], seed), TARGET)
    parts = [tmp_path / name for name in "abc"]
    append = DatasetWriter.append
    calls: list[int] = []

    def append_twice(writer: DatasetWriter, part: object) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        append(writer, part)  # type: ignore[arg-type]

    monkeypatch.setattr(DatasetWriter, "append", append_twice)
    with pytest.raises(KeyboardInterrupt):
        merge_datasets(parts, tmp_path / "all")
    merged = merge_datasets(parts, tmp_path / "all")
    assert merged.lengths.tolist() == [3, 4, 3, 5, 3, 6]
    assert len(calls) == 4, "what stood was not written again"


def test_other_targets_are_refused(tmp_path: Path) -> None:
    write_dataset(tmp_path / "a", random_documents([3]), TARGET)
    other = replace(TARGET, chat_template="z" * 64)
    write_dataset(tmp_path / "b", random_documents([3]), other)
    with pytest.raises(DataError, match="not of the same target"):
        merge_datasets([tmp_path / "a", tmp_path / "b"], tmp_path / "c")
