"""What all communicators promise, those that are there without a card: three ranks on threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from specengine.core.parallel import Communicator
from specengine.runner.communicators import host_memory
from specengine.runner.communicators.host_memory import HostMemoryCommunicator
from specengine.runner.communicators.lost import RanksLostError
from specengine.runner.communicators.torch_distributed import TorchCommunicator
from tests.support.waiting import until

SIZE = 3
OnRanks = Callable[[Callable[[Any], Any]], list[Any]]


def by_memory(folder: Path, size: int = SIZE) -> list[HostMemoryCommunicator]:
    first = HostMemoryCommunicator.create(size)
    others = [HostMemoryCommunicator(os.dup(first.file), rank, size) for rank in range(1, size)]
    return [first, *others]


def by_gloo(folder: Path) -> list[TorchCommunicator]:
    def connect(rank: int) -> TorchCommunicator:
        store = FileStore(str(folder / "store"), SIZE)
        return TorchCommunicator(store, rank, SIZE, torch.device("cpu"))

    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(connect, range(SIZE)))


@pytest.fixture(params=[by_memory, by_gloo])
def on_ranks(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> OnRanks:
    """What a function gives on each rank. Memory takes few elements at once."""
    monkeypatch.setattr(host_memory, "_PART", 256)
    ranks: list[Communicator] = request.param(tmp_path)

    def run(do: Callable[[Communicator], Any]) -> list[Any]:
        with ThreadPoolExecutor(SIZE) as pool:
            return list(pool.map(do, ranks))

    return run


def numbers(rank: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("shape", [(5,), (3, 129), (0, 7), (2, 0)])
def test_sums_and_gathered_tensors_are_those_of_all_ranks(
    shape: tuple[int, ...], on_ranks: OnRanks
) -> None:
    """Again and again, of another size each time: what is left of the one before shows."""
    for repeat in range(4):
        size = (*shape[:-1], shape[-1] + 2 * repeat if shape[-1] else 0)
        each = [numbers(10 * repeat + rank, *size) for rank in range(SIZE)]
        sums = on_ranks(lambda ranks, each=each: ranks.all_reduce(each[ranks.rank].clone()))
        assert all(torch.equal(one, sums[0]) for one in sums), "other bits on another rank"
        assert torch.allclose(sums[0], sum(each, torch.zeros(size)), atol=1e-6)
        for found in on_ranks(lambda ranks, each=each: ranks.all_gather(each[ranks.rank])):
            assert torch.equal(found, torch.stack(each))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.float64])
def test_types_and_tensors_with_gaps_are_taken(dtype: torch.dtype, on_ranks: OnRanks) -> None:
    each = [(8 * numbers(rank, 6, 40)).to(dtype) for rank in range(SIZE)]
    columns = [one[:, 1::3] for one in each]
    sums = on_ranks(lambda ranks: ranks.all_reduce(columns[ranks.rank]))
    expected = sum(one.double() for one in columns)
    for found in sums:
        assert found.dtype == dtype
        assert torch.equal(found, sums[0])
        assert torch.allclose(found.double(), expected, rtol=0.02, atol=0.2)
    for found in on_ranks(lambda ranks: ranks.all_gather(columns[ranks.rank])):
        assert torch.equal(found, torch.stack(columns))


def test_truth_is_gathered(on_ranks: OnRanks) -> None:
    each = [numbers(rank, 300) > 0 for rank in range(SIZE)]
    for found in on_ranks(lambda ranks: ranks.all_gather(each[ranks.rank])):
        assert torch.equal(found, torch.stack(each))


def test_greatest_number_of_each_place_is_found(on_ranks: OnRanks) -> None:
    each = [[-5, 2**40, 0], [-3, 7, 0], [-9, 8, 1]]
    assert on_ranks(lambda ranks: ranks.greatest(each[ranks.rank])) == [[-3, 2**40, 1]] * SIZE


def test_rank_that_goes_on_leaves_what_another_still_reads(tmp_path: Path) -> None:
    """One rank reads the first sum's parts when the other has written that of the second."""
    first, second = by_memory(tmp_path, 2)
    exchange = second._exchange

    def late(part: Tensor) -> list[Tensor]:
        places = exchange(part)
        until(lambda: second._counts[0] == 2)
        return places

    second._exchange = late  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as pool:
        going_on = pool.submit(lambda: [first.all_reduce(torch.full((3,), n)) for n in (1, 20)])
        found = pool.submit(lambda: [second.all_reduce(torch.full((3,), n)) for n in (300, 4000)])
        sums = [[one.tolist() for one in each.result(60)] for each in (going_on, found)]
    assert sums == [[[301] * 3, [4020] * 3]] * 2


def test_rank_that_is_aborted_waits_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "_PATIENCE", 60.0)  # then another error ends it
    first, _ = by_memory(tmp_path, 2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.all_reduce, torch.ones(3))
        first.abort()
        with pytest.raises(RanksLostError, match="another rank has ended"):
            waiting.result()


def test_rank_that_never_comes_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "_PATIENCE", 0.0)
    first, _ = by_memory(tmp_path, 2)
    with pytest.raises(RanksLostError, match="has not come to a collective"):
        first.greatest([1])


@pytest.mark.parametrize(
    "collective",
    [
        lambda ranks: ranks.greatest([1]),
        lambda ranks: ranks.all_reduce(torch.ones(3)),
        lambda ranks: ranks.all_gather(torch.ones(3)),
    ],
)
def test_collective_whose_other_ranks_have_ended_says_whose_it_was(
    collective: Callable[[Communicator], Any], tmp_path: Path
) -> None:
    """By its type: what PyTorch says may change."""
    ranks = by_gloo(tmp_path)
    del ranks[1:]
    with pytest.raises(RanksLostError) as raised:
        collective(ranks[0])
    assert raised.value.ranks is ranks[0]
