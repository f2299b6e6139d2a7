"""Bytes from one process to another through memory that both have mapped.

One writer and one reader. Each counts what it has moved, in a word of its own, so that neither
waits for the other's lock. Between bytes and counter stands a lock of the process's own: taking it
keeps their order on processors that change it.

A counter is written by one aligned store of eight bytes, through a memoryview of words.
struct.pack_into would not do: it clears its bytes first, and a reader that saw the 0 would begin
again with the first message.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from threading import Lock

from specengine.core.errors import EngineStoppedError

_WORD = 8  # bytes
_HEAD, _TAIL, _DATA = 0, 64, 128  # bytes; the two counters lie in cache lines of their own
_LENGTH = struct.Struct("<Q")
_fence = Lock()
_SPINS = 200  # looks, about 20 us, before a waiting process lets others run
_SHORT, _LONG = 20e-6, 1e-3  # seconds between looks, right after a message and much later
_PATIENT_AFTER = 0.05  # seconds without a message


_MEMORY = Path("/dev/shm")


class Ring:
    """One end. `file` is an open file without a name, which the other process inherits."""

    def __init__(self, file: int) -> None:
        self.file = file
        self._bytes = mmap.mmap(file, os.fstat(file).st_size)
        self._words = memoryview(self._bytes)[:_DATA].cast("Q")
        self.capacity = len(self._bytes) - _DATA
        self._moved = 0  # by this end, bytes

    @classmethod
    def create(cls, capacity: int = 4 << 20) -> Ring:
        """capacity: bytes."""
        folder = _MEMORY if _MEMORY.is_dir() else None
        with tempfile.TemporaryFile(dir=folder) as file:
            file.truncate(_DATA + capacity)
            return cls(os.dup(file.fileno()))

    @property
    def unread(self) -> int:
        """Bytes that were written and not read."""
        return self._word(_HEAD) - self._word(_TAIL)

    def write(self, message: bytes, check: Callable[[], None]) -> None:
        """Waits while there is no room. check: called while waiting; it may raise."""
        view = memoryview(_LENGTH.pack(len(message)) + message)
        while view:  # a message longer than the ring goes in parts
            room = self.capacity - (self._moved - self._word(_TAIL))
            part = view[:room]
            if part:
                self._put(part)
                view = view[len(part) :]
            else:
                check()
                time.sleep(_SHORT)

    def read(self, check: Callable[[], None]) -> bytes:
        """The next message. Waits for it, and calls `check` while waiting."""
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size, check))
        message = self._take(length, check)
        self._set(_TAIL, self._moved)
        return message

    def close(self) -> None:
        self._words.release()
        self._bytes.close()
        os.close(self.file)

    def _put(self, part: memoryview) -> None:
        place = self._moved % self.capacity
        first = min(len(part), self.capacity - place)
        self._bytes[_DATA + place : _DATA + place + first] = part[:first]
        self._bytes[_DATA : _DATA + len(part) - first] = part[first:]
        self._moved += len(part)
        self._set(_HEAD, self._moved)

    def _take(self, count: int, check: Callable[[], None]) -> bytes:
        found = b""
        while len(found) < count:
            ready = self._wait(check)
            place = self._moved % self.capacity
            size = min(ready, count - len(found), self.capacity - place)
            found += self._bytes[_DATA + place : _DATA + place + size]
            self._moved += size
            if len(found) < count:  # a long message: the writer needs the room
                self._set(_TAIL, self._moved)
        return found

    def _wait(self, check: Callable[[], None]) -> int:
        """Until there is something to read: how many bytes."""
        looks, start = 0, 0.0
        while not (ready := self._word(_HEAD) - self._moved):
            looks += 1
            if looks < _SPINS:
                continue
            if looks == _SPINS:
                start = time.monotonic()
                os.sched_yield()
                continue
            check()
            patient = time.monotonic() - start > _PATIENT_AFTER
            time.sleep(_LONG if patient else _SHORT)
        if not 0 < ready <= self.capacity:
            raise EngineStoppedError(f"a ring between ranks is broken: {ready} bytes to read")
        return ready

    def _word(self, offset: int) -> int:
        found = self._words[offset // _WORD]
        with _fence:
            return found

    def _set(self, offset: int, value: int) -> None:
        with _fence:
            self._words[offset // _WORD] = value
