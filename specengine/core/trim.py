"""Memory that is free goes back to the system."""

from __future__ import annotations

import ctypes
import threading
from time import monotonic

IDLE = 3.0  # seconds without work before memory is given back
AT_LEAST_EVERY = 30.0  # seconds, where there is always work


def trim_memory() -> None:
    """glibc's; other allocators are left alone. It keeps most of what is free between other
    blocks, whose number a burst of large requests multiplies. Takes milliseconds, without the
    interpreter's lock."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class IdleTrim:
    """Trims in a thread when work has paused, and now and then while it does not."""

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
            threading.Thread(target=trim_memory, name="trim", daemon=True).start()
