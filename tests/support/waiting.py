"""Waiting for what another thread or process does: generously, for machines are busy."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

LIMIT = 120.0  # seconds


def until(holds: Callable[[], Any], seconds: float = LIMIT) -> Any:
    """What it gives, once that is true. Asked less and less often: what is asked for comes later
    where the asking takes a processor."""
    deadline, pause = time.monotonic() + seconds, 0.002
    while time.monotonic() < deadline:
        if found := holds():
            return found
        time.sleep(pause)
        pause = min(1.3 * pause, 0.06)
    raise AssertionError("it did not come to that")
