"""Large pages of the host's memory for weights: a page of 4 KiB costs a fault when it is first
written, and 2.4 GB of weights have 600,000 of them."""

from __future__ import annotations

import ctypes
import mmap

from torch import Tensor

_HUGE_PAGE = 2 << 20
_ADVICE = 14  # MADV_HUGEPAGE of Linux


def advise_huge_pages(tensor: Tensor) -> None:
    """Ask for them under a tensor's memory, where the system has them and there is room for one.
    Memory that was written before stays as it is."""
    storage = tensor.untyped_storage()
    start = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (storage.data_ptr() + storage.nbytes() - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if size < _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    # It is advice: a kernel without such pages says so, and nothing is different.
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _ADVICE)
