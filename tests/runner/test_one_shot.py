"""When sums of few rows leave NCCL: only where both ranks have seen the kernel give the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

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
    buffers = {dtype: torch.empty(4096, dtype=dtype) for dtype in one_shot._DTYPES}
    monkeypatch.setattr(OneShotCommunicator, "_map", lambda self, store, device: buffers)
    monkeypatch.setattr(OneShotCommunicator, "_add_up", add_up)

    def run() -> bool:
        rank = communicator().rank
        store = FileStore(str(tmp_path / "store"), 2)
        return OneShotCommunicator(store, rank, 2, torch.device("cpu")).is_one_kernel

    assert on_threads(2, run) == [is_used, is_used]
