"""Memory that is free goes back to the system."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from time import monotonic

IDLE = 3.0  # seconds without work before memory is given back
AT_LEAST_EVERY = 30.0  # seconds, where there is always work

# mallopt's parameters, by their numbers in glibc's malloc.h.
_MMAP_THRESHOLD, _ARENA_MAX = -3, -8
NUM_ARENAS = 2  # the main thread's, and that of all others
LARGE = 2**18  # bytes of a block that is mapped by itself


def share_arenas() -> None:
    """Of glibc: threads share an arena, where each may have one of its own (eight a core). What a
    thread has freed stays in its arena between blocks that live on. Call it before threads begin.
    MALLOC_ARENA_MAX goes before it."""
    if "MALLOC_ARENA_MAX" not in os.environ:
        _mallopt(_ARENA_MAX, NUM_ARENAS)


def map_large_blocks() -> None:
    """Of glibc: blocks of LARGE bytes go back to the system when they are freed. By default the
    first one of 32 MB that is freed has smaller ones put between others. It costs a page fault a
    page of each block: not for what computes. MALLOC_MMAP_THRESHOLD_ goes before it."""
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        _mallopt(_MMAP_THRESHOLD, LARGE)


class _Usage(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def allocated_bytes() -> int:
    """Bytes of all blocks in use, as glibc counts them; 0 where it cannot say. Not those of
    Python's own small objects."""
    if (usage := getattr(ctypes.CDLL(None), "mallinfo2", None)) is None:
        return 0
    usage.restype = _Usage
    now = usage()
    return int(now.uordblks) + int(now.hblkhd)


def _mallopt(parameter: int, value: int) -> None:
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(parameter, value)


def trim_memory() -> None:
    """glibc's; other allocators are left alone. It keeps most of what is free between other
    blocks, whose number a burst of large requests multiplies. Takes milliseconds, without the
    interpreter's lock."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class IdleTrim:
    """Trims in a thread when work has paused, and now and then while it does not. In a pause it
    first collects what refers to itself, in the thread that calls: one that captures graphs may not
    have objects freed by another amid a capture."""

    def __init__(self) -> None:
        self._trimmed = self._worked = monotonic()
        self._is_due = False

    def note(self, works: bool) -> None:
        """Call it at least once a second or so. works: there was something to do."""
        now = monotonic()
        if works:
            self._worked, self._is_due = now, True
        paused = now - self._worked > IDLE
        if self._is_due and (paused or now - self._trimmed > AT_LEAST_EVERY):
            self._trimmed, self._is_due = now, False
            if paused and gc.isenabled():
                gc.collect()
            threading.Thread(target=trim_memory, name="trim", daemon=True).start()
