"""Bytes from one process to another through memory that both have mapped.

One writer and one reader. Each counts what it has moved, in a word of its own, so that neither
waits for the other's lock.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable

from specengine.core.errors import EngineStoppedError
from specengine.core.shared_words import SHORT, Words, unnamed_file, wait_for

_HEAD, _TAIL, _DATA = 0, 64, 128  # bytes; the two counters lie in cache lines of their own
_LENGTH = struct.Struct("<Q")


class Ring:
    """One end. `file` is an open file without a name, which the other process inherits."""

    def __init__(self, file: int) -> None:
        self.file = file
        self._bytes = mmap.mmap(file, os.fstat(file).st_size)
        self._words = Words(self._bytes, _DATA)
        self.capacity = len(self._bytes) - _DATA
        self._moved = 0  # by this end, bytes

    @classmethod
    def create(cls, capacity: int = 4 << 20) -> Ring:
        """capacity: bytes."""
        return cls(unnamed_file(_DATA + capacity))

    @property
    def unread(self) -> int:
        """Bytes that were written and not read."""
        return self._words[_HEAD] - self._words[_TAIL]

    def write(self, message: bytes, check: Callable[[], None]) -> None:
        """Waits while there is no room. check: called while waiting; it may raise."""
        view = memoryview(_LENGTH.pack(len(message)) + message)
        while view:  # a message longer than the ring goes in parts
            room = self.capacity - (self._moved - self._words[_TAIL])
            part = view[:room]
            if part:
                self._put(part)
                view = view[len(part) :]
            else:
                check()
                time.sleep(SHORT)

    def read(self, check: Callable[[], None]) -> bytes:
        """The next message. Waits for it, and calls `check` while waiting."""
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size, check))
        message = self._take(length, check)
        self._words[_TAIL] = self._moved
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
        self._words[_HEAD] = self._moved

    def _take(self, count: int, check: Callable[[], None]) -> bytes:
        found = b""
        while len(found) < count:
            ready = self._wait(check)
            place = self._moved % self.capacity
            size = min(ready, count - len(found), self.capacity - place)
            found += self._bytes[_DATA + place : _DATA + place + size]
            self._moved += size
            if len(found) < count:  # a long message: the writer needs the room
                self._words[_TAIL] = self._moved
        return found

    def _wait(self, check: Callable[[], None]) -> int:
        """Until there is something to read: how many bytes."""
        ready = wait_for(lambda: self._words[_HEAD] - self._moved, check)
        if not 0 < ready <= self.capacity:
            raise EngineStoppedError(f"a ring between ranks is broken: {ready} bytes to read")
        return ready
