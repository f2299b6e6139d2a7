from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specengine.core.errors import DataError
from specengine.draft.train.data.dataset import TokenDataset
from specengine.draft.train.data.packing import (
    PackedBatch,
    PackedBatches,
    batches_in_order,
    fill_batches,
    pack,
)
from tests.train.data_sets import random_dataset


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    lengths = np.random.default_rng(0).integers(2, 30, size=60).tolist()
    return random_dataset(tmp_path_factory.mktemp("packing"), lengths)


def take(batches: PackedBatches, count: int) -> list[PackedBatch]:
    return list(itertools.islice(batches, count))


def same(a: list[PackedBatch], b: list[PackedBatch]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x.input_ids, y.input_ids) and x.lens == y.lens
        for x, y in zip(a, b, strict=True)
    )


def texts(batches: list[PackedBatch]) -> list[tuple[int, ...]]:
    found = []
    for batch in batches:
        tokens = iter(batch.input_ids.tolist())
        found += [tuple(itertools.islice(tokens, length)) for length in batch.lens]
    return found


def test_layout_of_a_batch(tmp_path: Path) -> None:
    dataset = random_dataset(tmp_path, [3, 4, 2])
    batch = pack(dataset, np.array([2, 0]))
    expected = [*dataset[2].tokens.tolist(), *dataset[0].tokens.tolist()]
    assert batch.input_ids.tolist() == expected
    assert batch.input_ids.dtype == torch.int64
    assert batch.positions.tolist() == [0, 1, 0, 1, 2]
    assert batch.document_ids.tolist() == [0, 0, 1, 1, 1]
    assert batch.lens == [2, 3]
    assert batch.loss_mask.tolist() == [False, True, False, True, True]
    assert batch.num_tokens == 5
    assert same([batch.to(torch.device("cpu"))], [batch])


@given(
    lengths=st.lists(st.integers(1, 8), min_size=1, max_size=40),
    batch_tokens=st.integers(8, 24),
)
@settings(max_examples=50)
def test_batches_are_as_full_as_whole_documents_allow(
    lengths: list[int], batch_tokens: int
) -> None:
    sizes, order = np.array(lengths), np.arange(len(lengths))
    batches = fill_batches(sizes, order, batch_tokens)
    assert np.concatenate(batches).tolist() == order.tolist()
    totals = [int(sizes[batch].sum()) for batch in batches]
    assert max(totals) <= batch_tokens
    for total, following in zip(totals, batches[1:], strict=False):
        assert total + sizes[following[0]] > batch_tokens


def test_an_epoch_has_every_document_once(dataset: TokenDataset) -> None:
    batches = PackedBatches(dataset, 64, seed=3)
    first = take(batches, batches.batches_per_epoch)
    second = take(batches, 1)
    assert batches.epoch == 1
    everything = sorted(tuple(one.tokens.tolist()) for one in dataset.documents)
    assert sorted(texts(first)) == everything
    second += take(batches, batches.batches_per_epoch - 1)
    assert sorted(texts(second)) == everything
    assert texts(first) != texts(second), "epochs are shuffled anew"


def test_the_order_follows_from_the_seed(dataset: TokenDataset) -> None:
    one, two = (take(PackedBatches(dataset, 64, seed=3), 40) for _ in range(2))
    assert same(one, two)
    assert not same(one, take(PackedBatches(dataset, 64, seed=4), 40))


@pytest.mark.parametrize("taken", [0, 1, 13, 45])
def test_resuming_gives_the_same_batches(dataset: TokenDataset, taken: int) -> None:
    straight = PackedBatches(dataset, 64, seed=3)
    take(straight, taken)
    state = straight.state_dict()
    resumed = PackedBatches(dataset, 64, seed=3)
    resumed.load_state_dict(state)
    assert same(take(straight, 30), take(resumed, 30))


def test_resuming_with_other_data_is_refused(dataset: TokenDataset) -> None:
    state = PackedBatches(dataset, 64, seed=3).state_dict()
    with pytest.raises(DataError, match="batch_tokens is 65, and was 64"):
        PackedBatches(dataset, 65, seed=3).load_state_dict(state)
    with pytest.raises(DataError, match="num_documents"):
        PackedBatches(dataset.select(range(50)), 64, seed=3).load_state_dict(state)
    with pytest.raises(DataError, match="seed"):
        PackedBatches(dataset, 64, seed=4).load_state_dict(state)


def test_ranks_share_an_epoch(dataset: TokenDataset) -> None:
    whole = PackedBatches(dataset, 64, seed=3)
    every = take(whole, whole.batches_per_epoch)
    ranks = [PackedBatches(dataset, 64, seed=3, rank=rank, num_ranks=3) for rank in range(3)]
    share = {rank.batches_per_epoch for rank in ranks}
    assert share == {len(every) // 3}
    for number, rank in enumerate(ranks):
        mine = take(rank, rank.batches_per_epoch)
        assert same(mine, every[number::3][: len(mine)])


def test_too_long_documents_are_counted(tmp_path: Path) -> None:
    dataset = random_dataset(tmp_path, [5, 20, 6, 30])
    batches = PackedBatches(dataset, 12, seed=0)
    assert batches.num_too_long == 2
    assert sorted(map(len, texts(take(batches, batches.batches_per_epoch)))) == [5, 6]
    assert [batch.lens for batch in batches_in_order(dataset, 12)] == [[5, 6]]


def test_nothing_to_learn_from(tmp_path: Path) -> None:
    dataset = random_dataset(tmp_path, [5, 20])
    with pytest.raises(DataError, match="too few documents for a batch of 4"):
        PackedBatches(dataset, 4, seed=0)
    with pytest.raises(DataError, match="2 ranks"):
        PackedBatches(dataset, 64, seed=0, num_ranks=2)


def test_evaluation_goes_through_everything_in_order(dataset: TokenDataset) -> None:
    found = texts(list(batches_in_order(dataset, 64)))
    assert found == [tuple(one.tokens.tolist()) for one in dataset.documents]
