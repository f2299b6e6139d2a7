"""All-reduces of few rows in one kernel, over memory that two GPUs have mapped of each other."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

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
T = TypeVar("T")

_GROUP = "specengine"
_ALIGNED = 16  # bytes that the kernel moves at once
_DTYPES = (torch.bfloat16, torch.float32)  # that the kernel adds; float16 is NCCL's
_TO_MAP = timedelta(seconds=60)  # for the other rank's handles, once both have allocated
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
        # Whatever fails on one rank alone, the other learns before it waits for that rank: the host
        # at the rendezvous, the kernel on the device, where nothing would end it.
        buffers = self._agreed(self._allocate, PrefixStore("symmetric", store))
        if buffers is None or self._agreed(self._map, buffers, store) is None:
            return
        if self._agreed(self._check_sums, buffers, device) is not None:
            self._buffers = buffers

    def _agreed(self, do: Callable[..., T], *given: Any) -> T | None:
        """What it gives; None where it has failed on either rank. Both call this."""
        found, error = None, None
        try:
            found = do(*given)
        except RuntimeError as raised:
            error = raised
            logger.warning("all-reduces are NCCL's alone: %s", error)
        return found if self.greatest([int(error is not None)]) == [0] else None

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

    def _allocate(self, store: Store) -> dict[torch.dtype, Tensor]:
        """A buffer a type, of LARGEST bytes, in memory that the other rank can map. Waits for
        nobody."""
        symmetric: Any = _SymmetricMemory
        # The kernel has no use for NVLink's multicast, and its set-up can fail or hang.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        # Engines of --dp-size each see their own card alone, under the same number.
        os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
        self._name_group(store)
        card = torch.device("cuda", torch.cuda.current_device())
        return {
            dtype: symmetric.empty_strided_p2p(
                (LARGEST // dtype.itemsize,), (1,), dtype, card, _GROUP
            )
            for dtype in _DTYPES
        }

    def _map(self, buffers: dict[torch.dtype, Tensor], store: Store) -> bool:
        """The other rank's, too. Waits for it, as long as the store does."""
        symmetric: Any = _SymmetricMemory
        before = store.timeout  # type: ignore[attr-defined]  # not in PyTorch's stubs
        store.set_timeout(_TO_MAP)
        try:
            for buffer in buffers.values():
                symmetric.rendezvous(buffer, _GROUP)
        finally:
            store.set_timeout(before)
        return True

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

    def _check_sums(self, buffers: dict[torch.dtype, Tensor], device: torch.device) -> bool:
        """Raises RuntimeError where they are not NCCL's. Both ranks make all sums, whatever one of
        them finds: else the other would wait."""
        makes = torch.Generator(device).manual_seed(self.rank)
        others = []
        for dtype, place in buffers.items():
            x = torch.randn(4096, generator=makes, device=device).to(dtype)
            found = self._add_up(x, place)
            if not torch.equal(found, super().all_reduce(x.clone())):
                others.append(dtype)
        if others:
            raise RuntimeError(f"other sums of {others}")
        return True
