"""Waiting for what another thread or process does: generously, for machines are busy."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

LIMIT = 120.0  # seconds


def until(holds: Callable[[], Any], seconds: float = LIMIT) -> Any:
    """What it gives, once that is true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := holds():
            return found
        time.sleep(0.01)
    raise AssertionError("it did not come to that")
