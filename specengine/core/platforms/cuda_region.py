"""Device memory that is given back while its addresses stay reserved, by torch-memory-saver."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any

import torch
from torch import Tensor

from specengine.core.errors import ConfigError, OutOfMemoryError
from specengine.core.region import Region

_numbers = count()


@dataclass(frozen=True)
class Block:
    """What one tensor, or several that view it, have allocated."""

    address: int
    size: int  # bytes

    @property
    def bytes(self) -> Tensor:
        """uint8 [size], a view."""
        return torch.as_tensor(_Raw(self), device="cuda")


class _Raw:
    def __init__(self, block: Block) -> None:
        self.__cuda_array_interface__ = {
            "shape": (block.size,),
            "typestr": "|u1",
            "data": (block.address, False),
            "version": 3,
        }


class CudaRegion(Region):
    """A pool of PyTorch's allocator of its own. The library unmaps the pool's memory and maps other
    memory there. What is kept lies in pageable memory of the host meanwhile.

    The pool's memory is not used for anything else, and what was freed in it, such as what loading
    took for a moment, stays in it until the process ends.
    """

    def __init__(self) -> None:
        """Raises ConfigError where the library is missing."""
        super().__init__()
        self._saver = _library()
        self._tag = f"specengine-{next(_numbers)}"
        self._pools: set[tuple[int, int]] = set()
        self._kept: list[tuple[Block, Tensor]] = []
        self._dropped: list[Block] = []

    @contextmanager
    def allocating(self) -> Iterator[None]:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # the allocator tells nothing before
        others = {one["segment_pool_id"] for one in _segments()} - self._pools
        with self._saver.region(tag=self._tag):
            yield
        self._pools |= {one["segment_pool_id"] for one in _segments()} - others

    def release(self, dropped: Iterable[Tensor]) -> int:
        torch.cuda.synchronize()
        places = {one.untyped_storage().data_ptr() for one in dropped}
        blocks = list(self._blocks())
        self._dropped = [one for one in blocks if one.address in places]
        self._kept = [(one, one.bytes.cpu()) for one in blocks if one.address not in places]
        before = torch.cuda.mem_get_info()[0]
        self._saver.pause(self._tag)
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0] - before)

    def restore(self) -> None:
        free, needed = torch.cuda.mem_get_info()[0], self._num_bytes
        if free < needed:  # the library would end the process
            raise OutOfMemoryError(
                f"the engine gave {needed} bytes back, and {free} are free now: end what has taken "
                "them, and wake it again"
            )
        self._saver.resume(self._tag)
        for block, values in self._kept:
            block.bytes.copy_(values)
        for block in self._dropped:
            block.bytes.zero_()
        torch.cuda.synchronize()
        self._kept, self._dropped = [], []

    @property
    def _num_bytes(self) -> int:
        return sum(one["total_size"] for one in self._own_segments())

    def _own_segments(self) -> Iterator[Any]:
        return (one for one in _segments() if one["segment_pool_id"] in self._pools)

    def _blocks(self) -> Iterator[Block]:
        """All blocks that are in use."""
        for segment in self._own_segments():
            for one in segment["blocks"]:
                if one["state"] == "active_allocated":
                    yield Block(one["address"], one["size"])


def _segments() -> list[Any]:
    """Of the default pool too, whose id is (0, 0)."""
    found: list[Any] = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    return [one for one in found if one["segment_pool_id"] != (0, 0)]


@cache
def _library() -> Any:
    """Raises ConfigError."""
    try:
        from torch_memory_saver import torch_memory_saver as saver
    except ImportError as error:
        raise ConfigError(
            "--enable-sleep-mode: torch-memory-saver is not installed; install specengine[sleep]"
        ) from error
    saver.hook_mode = "torch"  # a pool of PyTorch's allocator: no LD_PRELOAD
    # Never destroyed: its pools may be freed within its regions alone, and the interpreter's end is
    # not one; the library would end the process with an error.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(saver))
    return saver
