"""When the engine last turned to its next step, in memory that the supervisor sees."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from time import monotonic

_TIME = struct.Struct("d")  # seconds of time.monotonic(), the same clock for every process


class Alive:
    """A file of one number. It is read while the writer hangs, whatever holds its lock."""

    def __init__(self, path: str) -> None:
        file = Path(path)
        if not file.exists():
            file.write_bytes(_TIME.pack(monotonic()))
        with file.open("r+b") as opened:
            self._memory = mmap.mmap(opened.fileno(), _TIME.size)
        # One store writes it. struct.pack_into clears it first: a reader of that 0 would take the
        # engine for hanging.
        self._time = memoryview(self._memory).cast("d")

    def beat(self) -> None:
        self._time[0] = monotonic()

    def age(self) -> float:
        """Seconds since the last beat."""
        return monotonic() - self._time[0]

    def close(self) -> None:
        self._time.release()
        self._memory.close()
