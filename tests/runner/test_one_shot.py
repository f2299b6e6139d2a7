"""When sums of few rows leave NCCL: only where both ranks have seen the kernel give the same."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from specengine.core.parallel import communicator
from specengine.runner.communicators import one_shot
from specengine.runner.communicators.one_shot import OneShotCommunicator
from specengine.runner.communicators.torch_distributed import TorchCommunicator
from tests.support.pretended_ranks import on_threads

AddUp = Callable[[OneShotCommunicator, Tensor, Tensor], Tensor]


def same(self: OneShotCommunicator, x: Tensor, place: Tensor) -> Tensor:
    return TorchCommunicator.all_reduce(self, x.clone())


def other(self: OneShotCommunicator, x: Tensor, place: Tensor) -> Tensor:
    return same(self, x, place) + self.rank


def lacking(self: OneShotCommunicator, x: Tensor, place: Tensor) -> Tensor:
    if x.dtype == torch.float32:
        raise NotImplementedError("not implemented for 'Float'")
    return same(self, x, place)


@pytest.mark.parametrize(("add_up", "is_used"), [(same, True), (other, False), (lacking, False)])
def test_kernel_is_used_only_where_it_gives_the_same_sums_on_both_ranks(
    add_up: AddUp, is_used: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OneShotCommunicator, "_allocate", allocate)
    monkeypatch.setattr(OneShotCommunicator, "_map", lambda *_: True)
    monkeypatch.setattr(OneShotCommunicator, "_add_up", add_up)
    assert connected(tmp_path) == [is_used, is_used]


@pytest.mark.parametrize("fails", ["_allocate", "_map"])
def test_rank_that_cannot_map_memory_is_not_waited_for(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel would wait for it on the device, for ever."""
    begun = list[str]()

    def step(name: str) -> Callable[..., Any]:
        def run(self: OneShotCommunicator, *_: Any) -> Any:
            begun.append(name)
            if name == fails and self.rank:
                raise RuntimeError("out of memory")
            return {"": torch.empty(0)}

        return run

    for name in ("_allocate", "_map", "_check_sums"):
        monkeypatch.setattr(OneShotCommunicator, name, step(name))
    assert connected(tmp_path) == [False, False]
    assert begun[-2:] == [fails, fails]


def test_rendezvous_waits_less_long_than_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, waits = FileStore(str(tmp_path / "store"), 1), list[timedelta]()
    before = store.timeout

    def rendezvous(*_: Any) -> None:
        waits.append(store.timeout)
        raise RuntimeError("the other rank has not come")

    monkeypatch.setattr(one_shot, "_SymmetricMemory", SimpleNamespace(rendezvous=rendezvous))
    made = OneShotCommunicator.__new__(OneShotCommunicator)
    with pytest.raises(RuntimeError, match="has not come"):
        made._map({torch.float32: torch.empty(0)}, store)
    assert waits == [one_shot._TO_MAP] != [before]
    assert store.timeout == before


def allocate(self: OneShotCommunicator, store: Any) -> dict[torch.dtype, Tensor]:
    return {dtype: torch.empty(4096, dtype=dtype) for dtype in one_shot._DTYPES}


def connected(folder: Path) -> list[bool]:
    """Whether each of two ranks has the kernel."""

    def run() -> bool:
        rank = communicator().rank
        store = FileStore(str(folder / "store"), 2)
        return OneShotCommunicator(store, rank, 2, torch.device("cpu")).is_one_kernel

    return on_threads(2, run)
