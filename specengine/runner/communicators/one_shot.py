"""All-reduces of few rows in one kernel, over memory that two GPUs have mapped of each other."""

from __future__ import annotations

import ctypes
import logging
import os
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

from specengine.kernels.precompile import current
from specengine.runner.communicators.torch_distributed import TorchCommunicator

logger = logging.getLogger(__name__)

_GROUP = "specengine"
_ALIGNED = 16  # bytes that the kernel moves at once
_DTYPES = (torch.bfloat16, torch.float32)  # that the kernel adds; float16 is NCCL's
LARGEST = 512 << 10  # bytes; of more, NCCL's transfer is the faster one


class OneShotCommunicator(TorchCommunicator):
    """For two ranks. Each reads what both have written, and adds it up: two numbers have one sum in
    either order, so that both ranks have the same bits, and those of NCCL.

    The kernel is PyTorch's (symmetric memory), and waits for the other rank's at its start and at
    its end: kernels of one stream take turns with the buffer. NCCL does what is larger, what is of
    another type, and all of it where the memory cannot be mapped.
    """

    def __init__(self, store: Store, rank: int, size: int, device: torch.device) -> None:
        """Waits until both ranks are there."""
        self._buffers: dict[torch.dtype, Tensor] = {}
        super().__init__(store, rank, size, device)
        buffers: dict[torch.dtype, Tensor] = {}
        works = False
        try:
            buffers = self._map(PrefixStore("symmetric", store), device)
            works = self._gives_nccl_s_sums(buffers, device)
        except RuntimeError as error:  # of either, and on both ranks: they do the same
            logger.warning("all-reduces are NCCL's alone: %s", error)
        if self.greatest([int(not works)]) == [0]:
            self._buffers = buffers

    @property
    def is_one_kernel(self) -> bool:
        """Whether sums of few rows are; else all are NCCL's."""
        return bool(self._buffers)

    def all_reduce(self, x: Tensor) -> Tensor:
        place = self._buffers.get(x.dtype) if x.is_cuda else None
        size = x.numel() * x.itemsize
        if place is None or not 0 < size <= LARGEST or size % _ALIGNED or current() is not None:
            return super().all_reduce(x)
        return self._add_up(x, place)

    def _add_up(self, x: Tensor, place: Tensor) -> Tensor:
        """x: contiguous or not; the sum is."""
        own = x.contiguous().view(-1)
        out: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(
            place[: x.numel()], own, "sum", _GROUP
        )
        return out.view(x.shape)

    def _map(self, store: Store, device: torch.device) -> dict[torch.dtype, Tensor]:
        """A buffer a type, of LARGEST bytes."""
        symmetric: Any = _SymmetricMemory
        # The kernel has no use for NVLink's multicast, and its set-up can fail or hang.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        # Engines of --dp-size each see their own card alone, under the same number.
        os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
        self._name_group(store)
        card = torch.device("cuda", torch.cuda.current_device())
        buffers = {}
        for dtype in _DTYPES:
            count = LARGEST // dtype.itemsize
            buffers[dtype] = symmetric.empty_strided_p2p((count,), (1,), dtype, card, _GROUP)
            symmetric.rendezvous(buffers[dtype], _GROUP)
        return buffers

    def _name_group(self, store: Store) -> None:
        """Symmetric memory finds the ranks by the name of a group."""
        group: Any = ProcessGroup(store, self.rank, self.size)
        kind = ProcessGroup.BackendType.NCCL
        group._set_default_backend(kind)
        group._register_backend(torch.device("cuda"), kind, self._group)
        group._set_group_name(_GROUP)
        register: Any = _register_process_group
        register(_GROUP, group)
        # The registry does not keep it; and no group is ever destroyed (torch_distributed.py).
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

    def _gives_nccl_s_sums(self, buffers: dict[torch.dtype, Tensor], device: torch.device) -> bool:
        """Both ranks make all sums, whatever one of them finds: else the other would wait."""
        makes = torch.Generator(device).manual_seed(self.rank)
        others = []
        for dtype, place in buffers.items():
            x = torch.randn(4096, generator=makes, device=device).to(dtype)
            found = self._add_up(x, place)
            if not torch.equal(found, super().all_reduce(x.clone())):
                others.append(dtype)
        if others:
            logger.warning("all-reduces are NCCL's alone: other sums of %s", others)
        return not others
