"""Collectives of torch.distributed: NCCL between GPUs, Gloo between processes on CPUs."""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    PrefixStore,
    ProcessGroupGloo,
    ReduceOp,
    Store,
)

from specengine.core.parallel import FAILED_EXIT, Communicator
from specengine.kernels.precompile import current
from specengine.runner.communicators.lost import RanksLostError

_PATIENCE = timedelta(minutes=10)  # a rank may load or capture while others wait


class TorchCommunicator(Communicator):
    """Process groups of its own: torch.distributed's global one stays as it is, so that one process
    may have several of these, one after the other or together.

    NCCL's kernels run on the current stream, in graphs too; the first collective, which connects
    the ranks, is made here, since none may be the first within a capture. Ring and tree
    all-reduces add in one order and hand the sum on, so that all ranks have the same bits.
    """

    def __init__(self, store: Store, rank: int, size: int, device: torch.device) -> None:
        """Waits until all ranks are there. device: "cuda" is this process's current one."""
        self.rank, self.size, self.store = rank, size, store
        gloo = PrefixStore("host", store)
        kind: Any = ProcessGroupGloo
        here = kind._Options()
        here._devices = [kind.create_device(hostname="127.0.0.1")]  # all ranks are on one host
        here._timeout = _PATIENCE
        self._host = kind(gloo, rank, size, here)
        self._group: Any = self._host
        if device.type == "cuda":
            nccl = PrefixStore("device", store)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = _PATIENCE
            self._group = dist.ProcessGroupNCCL(nccl, rank, size, options)
            # Never destroyed: its end waits for the other ranks, which have ended by then, and for
            # all graphs that it is in.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
            self.all_reduce(torch.zeros(1, device=device))
            torch.cuda.synchronize()

    def all_reduce(self, x: Tensor) -> Tensor:
        if not x.numel() or current() is not None:  # what is precompiled is thrown away
            return x
        options = AllreduceOptions()
        options.asyncOp = False
        x = x.contiguous()
        self._wait(self._group.allreduce([x], options))
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        if not x.numel() or current() is not None:
            return x.expand(self.size, *x.shape)
        out = x.new_empty(self.size * x.numel())
        options = AllgatherOptions()
        options.asyncOp = False
        self._wait(self._group._allgather_base(out, x.flatten(), options))
        return out.view(self.size, *x.shape)

    def greatest(self, numbers: Sequence[int]) -> list[int]:
        found = torch.tensor(list(numbers), dtype=torch.int64)
        options = AllreduceOptions()
        options.reduceOp = ReduceOp.MAX  # type: ignore[assignment]
        self._wait(self._host.allreduce([found], options))
        return [int(one) for one in found]

    def abort(self) -> None:
        """Let go of kernels that wait for a rank that is gone. From any thread. This process can
        end at once from then on, and no other way: what NCCL and CUDA do at its end would dump the
        core."""
        if self._group is not self._host:
            atexit.register(_leave)
            self._group.abort()

    def _wait(self, work: Any) -> None:
        """None: it was enqueued on the current stream."""
        if work is None:
            return
        try:
            work.wait()
        except RuntimeError as error:  # PyTorch's has no type of its own
            message = f"a collective of {self.size} ranks failed: {error}"
            raise RanksLostError(message, self) from error


def _leave() -> None:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(FAILED_EXIT)
