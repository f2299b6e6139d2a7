"""Memory that processes share, and counters in it by which they wait for each other.

A counter has one writer. Between what it counts and itself a lock of the process's own is taken:
this keeps their order on processors that change it. It is written by one aligned store of
eight bytes, through a memoryview of words: struct.pack_into clears its bytes first, and a reader
would see the 0.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from threading import Lock

_WORD = 8  # bytes
_MEMORY = Path("/dev/shm")
_fence = Lock()
_SPINS = 200  # looks, about 20 us, before a waiting process lets others run
SHORT, _LONG = 20e-6, 1e-3  # seconds between looks, right after a message and much later
_PATIENT_AFTER = 0.05  # seconds without a message


def unnamed_file(size: int) -> int:
    """An open file of so many zero bytes in memory, which other processes inherit."""
    with tempfile.TemporaryFile(dir=_MEMORY if _MEMORY.is_dir() else None) as file:
        file.truncate(size)
        return os.dup(file.fileno())


class Words:
    """The first `count` bytes of mapped memory as counters. Places are in bytes: those of different
    writers lie in cache lines of their own."""

    def __init__(self, memory: mmap.mmap, count: int) -> None:
        self._words = memoryview(memory)[:count].cast("Q")

    def __getitem__(self, place: int) -> int:
        found = self._words[place // _WORD]
        with _fence:
            return found

    def __setitem__(self, place: int, value: int) -> None:
        with _fence:
            self._words[place // _WORD] = value

    def release(self) -> None:
        self._words.release()


def wait_for(ready: Callable[[], int], check: Callable[[], None]) -> int:
    """What `ready` gives, once that is not 0. check: called while waiting; it may raise."""
    looks, start = 0, 0.0
    while not (found := ready()):
        looks += 1
        if looks < _SPINS:
            continue
        if looks == _SPINS:
            start = time.monotonic()
            os.sched_yield()
            continue
        check()
        patient = time.monotonic() - start > _PATIENT_AFTER
        time.sleep(_LONG if patient else SHORT)
    return found
