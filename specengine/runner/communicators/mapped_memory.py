"""Memory that two GPUs have mapped of each other (PyTorch's symmetric memory)."""

from __future__ import annotations

import ctypes
import os
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    PrefixStore,
    ProcessGroup,
    Store,
    _register_process_group,
    _SymmetricMemory,
)

GROUP = "specengine"
_TO_MAP = timedelta(seconds=60)  # for the other rank's handles, once both have allocated


class MappedMemory:
    """What one of two ranks allocates and maps."""

    def __init__(self, store: Store, rank: int, size: int, nccl: Any) -> None:
        """nccl: the ranks' process group."""
        self.store, self.rank, self.size, self.nccl = store, rank, size, nccl

    def allocate(self, count: int, dtype: torch.dtype) -> Tensor:
        """[count] zeros, which the other rank may write once both have allocated. Waits
        for this device alone."""
        symmetric: Any = _SymmetricMemory
        card = torch.device("cuda", torch.cuda.current_device())
        made: Tensor = symmetric.empty_strided_p2p((count,), (1,), dtype, card, GROUP)
        made.zero_()
        torch.cuda.synchronize()
        return made

    def map(self, own: Tensor) -> Tensor:
        """The other rank's, of the same size, as `allocate` gave `own`. Waits for that rank."""
        handle = self.meet(own)
        here, there = (
            handle.get_buffer(rank, own.shape, own.dtype) for rank in (self.rank, 1 - self.rank)
        )
        if here.data_ptr() != own.data_ptr():
            raise RuntimeError("symmetric memory begins elsewhere than its tensor")
        found: Tensor = there
        return found

    def meet(self, own: Tensor) -> Any:
        """PyTorch's handle of both ranks' memory. Waits for the other rank."""
        symmetric: Any = _SymmetricMemory
        before = self.store.timeout  # type: ignore[attr-defined]  # not in PyTorch's stubs
        self.store.set_timeout(_TO_MAP)
        try:
            handle = symmetric.rendezvous(own, GROUP)
        finally:
            self.store.set_timeout(before)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(handle))  # it holds what is mapped
        return handle

    def name_group(self) -> None:
        """Symmetric memory finds the ranks by the name of a group. Before all else."""
        # Our kernels and PyTorch's have no use for NVLink's multicast: its set-up can fail or hang.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        # Engines of --dp-size each see their own card alone, under the same number.
        os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
        group: Any = ProcessGroup(PrefixStore("symmetric", self.store), self.rank, self.size)
        kind = ProcessGroup.BackendType.NCCL
        group._set_default_backend(kind)
        group._register_backend(torch.device("cuda"), kind, self.nccl)
        group._set_group_name(GROUP)
        register: Any = _register_process_group
        register(GROUP, group)
        # The registry does not keep it; and no group is ever destroyed (torch_distributed.py).
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
