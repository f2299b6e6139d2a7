"""When sums of few rows leave NCCL: only where both ranks have seen a kernel give the same."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from specengine.core.parallel import communicator
from specengine.kernels.ranks import pair_sum
from specengine.kernels.ranks.pair_sum import PairSum
from specengine.runner.communicators import mapped_memory, one_shot, trial
from specengine.runner.communicators.mapped_memory import MappedMemory
from specengine.runner.communicators.one_shot import OneShotCommunicator, OwnKernel
from specengine.runner.communicators.torch_distributed import TorchCommunicator
from specengine.runner.communicators.trial import Trial
from tests.kernels.emulated_cuda import Compiled
from tests.support.pretended_ranks import on_threads

CPU = torch.device("cpu")


class Pretended:
    """A SumKernel that adds by Gloo; `error` is what its sums are wrong by, `fails` the step that
    fails on rank 1."""

    def __init__(self, name: str, error: float = 0.0, fails: str = "") -> None:
        self.name, self.error, self.fails = name, error, fails
        self.begun = list[str]()

    def allocate(self) -> None:
        self._step("allocate")

    def map(self) -> None:
        self._step("map")

    def pass_trial(self, trial: Trial) -> None:
        self._step("trial")
        trial.run_once(lambda x, stream: expected(trial, x, stream) + self.error)

    def add_up(self, x: Tensor, stream: Tensor | None) -> Tensor:
        return torch.full_like(x, 7)

    def _step(self, name: str) -> None:
        self.begun.append(name)
        if name == self.fails and communicator().rank:
            raise RuntimeError("out of memory")


def expected(trial: Trial, x: Tensor, stream: Tensor | None) -> Tensor:
    summed = trial._by_nccl(x.clone())
    return summed if stream is None else stream + summed


def connected(
    folder: Path, patch: pytest.MonkeyPatch, make: Callable[[], list[Any]]
) -> list[tuple[OneShotCommunicator, list[Any]]]:
    """Two ranks, and the kernels that each was given."""
    patch.setattr(MappedMemory, "name_group", lambda _: None)
    made: list[list[Any]] = [make(), make()]
    count = len(made[0])
    patch.setattr(
        one_shot,
        "KERNELS",
        [lambda _, place=place: made[communicator().rank][place] for place in range(count)],
    )

    def run() -> tuple[OneShotCommunicator, list[Any]]:
        rank = communicator().rank
        store = FileStore(str(folder / "store"), 2)
        return OneShotCommunicator(store, rank, 2, CPU), made[rank]

    return on_threads(2, run)


def taken(found: list[tuple[OneShotCommunicator, list[Any]]]) -> list[str | None]:
    return [None if ranks.kernel is None else ranks.kernel.name for ranks, _ in found]


@pytest.mark.parametrize(
    ("errors", "name"), [((0.0, 0.0), "first"), ((1.0, 0.0), "second"), ((1.0, 1.0), None)]
)
def test_first_kernel_with_the_same_sums_on_both_ranks_is_used(
    errors: tuple[float, float], name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = errors
    found = connected(
        tmp_path, monkeypatch, lambda: [Pretended("first", first), Pretended("second", second)]
    )
    assert taken(found) == [name, name]


@pytest.mark.parametrize("fails", ["allocate", "map", "trial"])
def test_rank_whose_step_fails_is_not_waited_for(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other's next step would wait for it."""
    if fails == "trial":  # its own sums end, without those of the other
        monkeypatch.setattr(Trial, "run_once", lambda *_: None)
    found = connected(tmp_path, monkeypatch, lambda: [Pretended("one", fails=fails)])
    assert taken(found) == [None, None]
    for _, (kernel,) in found:
        assert kernel.begun[-1] == fails


def test_sums_that_the_kernel_does_not_take_are_those_of_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = connected(tmp_path, monkeypatch, lambda: [Pretended("one")])
    monkeypatch.setattr(OneShotCommunicator, "_takes", lambda _, x: pair_sum.takes(x))

    def run() -> tuple[float, float, float, float]:
        ranks = found[communicator().rank][0]
        small, odd = torch.ones(1, 8), torch.ones(1, 9)
        sums = ranks.all_reduce(small), ranks.all_reduce_add(small, small)
        others = ranks.all_reduce(odd.clone()), ranks.all_reduce_add(odd.clone(), odd)
        a, b, c, d = (float(one[0, 0]) for one in (*sums, *others))
        return a, b, c, d

    assert on_threads(2, run) == [(7, 7, 2, 3)] * 2


def test_rendezvous_waits_less_long_than_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, waits = FileStore(str(tmp_path / "store"), 1), list[timedelta]()
    before = store.timeout

    def rendezvous(*_: Any) -> None:
        waits.append(store.timeout)
        raise RuntimeError("the other rank has not come")

    monkeypatch.setattr(mapped_memory, "_SymmetricMemory", SimpleNamespace(rendezvous=rendezvous))
    with pytest.raises(RuntimeError, match="has not come"):
        MappedMemory(store, 0, 2, None).map(torch.empty(0))
    assert waits == [mapped_memory._TO_MAP] != [before]
    assert store.timeout == before


def test_communicator_without_a_kernel_rounds_the_sum_before_it_adds_the_stream(
    tmp_path: Path,
) -> None:
    x, stream = torch.tensor([1.0, 256.0]).bfloat16(), torch.tensor([512.0, 1.0]).bfloat16()

    def run() -> Tensor:
        store = FileStore(str(tmp_path / "store"), 2)
        ranks = TorchCommunicator(store, communicator().rank, 2, CPU)
        return ranks.all_reduce_add(x.clone(), stream)

    for found in on_threads(2, run):
        assert torch.equal(found, stream + (x + x))


class _Replay:
    """A graph of what runs again when it is replayed."""

    def __init__(self, run: Callable[[], list[Tensor]]) -> None:
        self.run = run
        self.found = run()

    def replay(self) -> None:
        for old, new in zip(self.found, self.run(), strict=True):
            old.copy_(new)


class Threads(MappedMemory):
    """Memory of a thread each."""

    def allocate(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(count, dtype=dtype)

    def map(self, own: Tensor) -> Tensor:
        there: Tensor = communicator()._exchange(own)[1 - self.rank]  # type: ignore[attr-defined]
        return there


@pytest.fixture
def _threads(emulated_pair: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernel for ranks that are threads, on a CPU, instruction by instruction."""
    monkeypatch.setattr(pair_sum, "compiled", emulated_pair)
    monkeypatch.setattr(pair_sum, "can_run", lambda _: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(trial, "SIZES", (8, 576))
    both_forms = partial(PairSum, largest_in_words=1024)
    monkeypatch.setattr(one_shot, "PairSum", both_forms)
    monkeypatch.setattr(trial, "capture", lambda run, *_: ((graph := _Replay(run)), graph.found))
    monkeypatch.setattr(trial, "platform_of", lambda _: None)
    monkeypatch.setattr(Threads, "name_group", lambda _: None)
    monkeypatch.setattr(one_shot, "MappedMemory", Threads)
    monkeypatch.setattr(one_shot, "KERNELS", (OwnKernel,))
    monkeypatch.setattr(OneShotCommunicator, "_takes", lambda _, x: pair_sum.takes(x))


def sums(folder: Path) -> list[tuple[bool, Tensor]]:
    """Whether each rank has the kernel; and stream + a sum."""

    def run() -> tuple[bool, Tensor]:
        store, rank = FileStore(str(folder / "store"), 2), communicator().rank
        ranks = OneShotCommunicator(store, rank, 2, CPU)
        x, stream = torch.tensor([[1.0, 256.0] * 8]).bfloat16(), torch.full((1, 16), 0.5).bfloat16()
        return ranks.kernel is not None, ranks.all_reduce_add(x, stream)

    return on_threads(2, run)


def test_trial_has_sums_of_both_forms_in_each_type() -> None:
    """What it runs is compiled before a graph is captured."""
    for dtype in pair_sum.DTYPES:
        sizes = [count * dtype.itemsize for count in trial.SIZES]
        assert {size <= pair_sum.LARGEST_IN_WORDS for size in sizes} == {False, True}
        assert max(sizes) <= pair_sum.LARGEST


@pytest.mark.usefixtures("_threads")
def test_own_kernel_passes_its_trial(tmp_path: Path) -> None:
    for has_kernel, found in sums(tmp_path):
        assert has_kernel
        assert found[0, :2].tolist() == [2.5, 512]


@pytest.mark.usefixtures("_threads")
def test_ranks_give_up_a_kernel_whose_words_do_not_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Threads.map

    def lossy(self: Threads, own: Tensor) -> Tensor:
        there = whole(self, own)
        return there.clone() if self.rank else there

    monkeypatch.setattr(Threads, "map", lossy)
    monkeypatch.setattr(one_shot, "_TRIAL", 1)
    for has_kernel, found in sums(tmp_path):
        assert not has_kernel
        assert found[0, :2].tolist() == [2.5, 512]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="takes two cards")
def test_two_cards_give_the_sums_of_nccl(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.runner.pair_on_cards", str(tmp_path)]
    root = Path(__file__).parents[2]
    ranks = [subprocess.Popen([*command, str(rank)], cwd=root) for rank in range(2)]
    try:
        assert [one.wait(timeout=300) for one in ranks] == [0, 0]
    finally:
        for one in ranks:
            one.kill()
    for rank in range(2):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert found == {"kernel": "pair_sum", "others": [], "others in graphs": []}
