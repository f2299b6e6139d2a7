from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from specengine.core.errors import DataError
from specengine.draft.train.data.dataset import Document, TokenDataset, document_share
from specengine.draft.train.data.manifest import MANIFEST, Manifest, TargetIdentity
from specengine.draft.train.data.writer import DatasetWriter, Part, count_documents, write_dataset
from tests.train.data_sets import TARGET, random_dataset, random_documents

NO_KEYS = np.zeros(0, dtype=np.uint64)


def test_documents_come_back(tmp_path: Path) -> None:
    documents = random_documents([3, 1, 7])
    made = write_dataset(tmp_path / "set", documents, TARGET, seed=5, made={"by": "hand"})
    read = TokenDataset(tmp_path / "set")
    for dataset in (made, read):
        assert dataset.lengths.tolist() == [3, 1, 7]
        for found, given in zip(dataset.documents, documents, strict=True):
            np.testing.assert_array_equal(found.tokens, given.tokens)
            np.testing.assert_array_equal(found.loss, given.loss)
    assert read.manifest.seed == 5
    assert read.manifest.made == {"by": "hand"}
    assert read.manifest.counts == {"answer_tokens": 7, "documents": 3, "tokens": 11}
    assert read.num_tokens == 11
    assert read.files.tokens.dtype == np.uint16
    assert not (tmp_path / "set" / "parts").exists()


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    target = TargetIdentity(
        name="big", weights="", tokenizer="", chat_template="", vocab_size=151_936
    )
    document = Document(np.array([150_000, 2], np.uint32), np.ones(2, np.uint8))
    dataset = write_dataset(tmp_path, [document], target)
    assert dataset.files.tokens.dtype == np.uint32
    assert dataset[0].tokens.tolist() == [150_000, 2]


def test_split_follows_the_documents(tmp_path: Path) -> None:
    dataset = random_dataset(tmp_path / "a", [20] * 300)
    train, held_out = dataset.split(0.2, seed=1)
    assert len(train) + len(held_out) == 300
    assert 30 < len(held_out) < 90
    assert all(document_share(one.tokens, 1) < 0.2 for one in held_out.documents)
    assert all(document_share(one.tokens, 1) >= 0.2 for one in train.documents)
    other = dataset.split(0.2, seed=2)[1]
    assert other.indices.tolist() != held_out.indices.tolist()
    # the first hundred alone are split as they are among the rest
    smaller = write_dataset(tmp_path / "b", [dataset[i] for i in range(100)], TARGET)
    again = smaller.split(0.2, seed=1)[1]
    assert again.indices.tolist() == [i for i in held_out.indices.tolist() if i < 100]


def test_nothing_or_too_much_held_out(tmp_path: Path) -> None:
    dataset = random_dataset(tmp_path, [5] * 10)
    train, held_out = dataset.split(0.0, seed=0)
    assert (len(train), len(held_out)) == (10, 0)
    with pytest.raises(DataError, match="fraction"):
        dataset.split(1.0, seed=0)


def test_a_split_selects_further(tmp_path: Path) -> None:
    dataset = random_dataset(tmp_path, [2, 3, 4, 5])
    part = dataset.select([3, 1]).select([1])
    assert part.lengths.tolist() == [3]
    np.testing.assert_array_equal(part[0].tokens, dataset[1].tokens)


@pytest.mark.parametrize("name", ["tokens.npy", "offsets.npy", "loss.npy"])
def test_damage_is_found(tmp_path: Path, name: str) -> None:
    random_dataset(tmp_path, [4, 4])
    content = bytearray((tmp_path / name).read_bytes())
    content[-1] ^= 1
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"{name} is damaged"):
        TokenDataset(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(DataError, match=f"lacks {name}"):
        TokenDataset(tmp_path)


def test_files_that_do_not_fit_each_other(tmp_path: Path) -> None:
    random_dataset(tmp_path, [4, 4])
    np.save(tmp_path / "offsets.npy", np.array([0, 4, 9]))
    with pytest.raises(DataError, match="do not fit"):
        TokenDataset(tmp_path, verify=False)


def test_what_is_no_data_set(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="specengine data make"):
        TokenDataset(tmp_path)
    (tmp_path / MANIFEST).write_text("{")
    with pytest.raises(DataError, match="cannot read"):
        TokenDataset(tmp_path)
    (tmp_path / MANIFEST).write_text(json.dumps({"format": 99}))
    with pytest.raises(DataError, match="format 99"):
        TokenDataset(tmp_path)
    (tmp_path / MANIFEST).write_text(json.dumps({"format": 1}))
    with pytest.raises(DataError, match="damaged"):
        TokenDataset(tmp_path)


def test_another_model_is_refused(tmp_path: Path) -> None:
    dataset = random_dataset(tmp_path, [4])
    dataset.check_target(TARGET.tokenizer, TARGET.vocab_size)
    with pytest.raises(DataError, match="another tokenizer"):
        dataset.check_target("x" * 64, TARGET.vocab_size)
    with pytest.raises(DataError, match="vocabulary of 320"):
        dataset.check_target(TARGET.tokenizer, 321)


def test_an_interrupted_writer_goes_on(tmp_path: Path) -> None:
    documents = random_documents([3, 4, 5, 6])
    first = DatasetWriter(tmp_path, 320, {"seed": 1})
    assert list(first.resume()) == []
    keys = np.array([7, 2**63], dtype=np.uint64)
    first.append(Part(documents[:2], 12, count_documents(documents[:2]) | {"dropped": 1}, keys))
    (tmp_path / "parts" / "000001.tmp").write_bytes(b"half a part")  # the process was killed here

    second = DatasetWriter(tmp_path, 320, {"seed": 1})
    (part,) = second.resume()
    assert part.position == second.position == 12
    assert part.keys.tolist() == [7, 2**63]
    second.append(Part(documents[2:], 20, count_documents(documents[2:]), NO_KEYS))
    dataset = second.finish(TARGET, seed=1, made={})
    assert dataset.lengths.tolist() == [3, 4, 5, 6]
    assert Manifest.read(tmp_path).counts == {
        "answer_tokens": 2 + 2 + 3 + 3,
        "documents": 4,
        "dropped": 1,
        "tokens": 18,
    }
    TokenDataset(tmp_path)


def test_parts_make_the_same_files_as_a_whole(tmp_path: Path) -> None:
    documents = random_documents([3, 4, 5])
    writer = DatasetWriter(tmp_path / "parts", 320, {})
    for number, document in enumerate(documents):
        writer.append(Part([document], number + 1, count_documents([document]), NO_KEYS))
    pieces = writer.finish(TARGET, 0, {})
    whole = write_dataset(tmp_path / "whole", documents, TARGET)
    assert pieces.manifest == whole.manifest


def test_a_writer_refuses_other_recipes_and_finished_sets(tmp_path: Path) -> None:
    DatasetWriter(tmp_path / "a", 320, {"seed": 1})
    with pytest.raises(DataError, match="made otherwise"):
        DatasetWriter(tmp_path / "a", 320, {"seed": 2})
    random_dataset(tmp_path / "b", [2])
    with pytest.raises(DataError, match="finished data set already"):
        DatasetWriter(tmp_path / "b", 320, {})


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write"):
        DatasetWriter(tmp_path / "file" / "below", 320, {})


def test_nothing_was_made(tmp_path: Path) -> None:
    writer = DatasetWriter(tmp_path, 320, {})
    with pytest.raises(DataError, match="no document"):
        writer.finish(TARGET, 0, {})
    writer.append(Part([], 3, {"short": 3}, NO_KEYS))
    with pytest.raises(DataError, match="no document"):
        writer.finish(TARGET, 0, {})
