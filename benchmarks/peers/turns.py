"""Engines that start side by side and are measured one at a time. Needs the standard library alone.

The script that starts them makes a folder and gives it to each. An engine that is up leaves a file
there and waits for `GO`, which is made when all are up or have ended. Then each is measured while
it holds the folder's lock.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

GO = "go"
_LOCK, _UP = "lock", ".up"
_EACH = 0.1  # seconds


@contextmanager
def turn(folder: Path | None) -> Iterator[None]:
    """Say that this process is up, and hold the lock when it is its turn. None: at once."""
    if folder is None:
        yield
        return
    (folder / f"{os.getpgrp()}{_UP}").touch()
    while not (folder / GO).exists():
        time.sleep(_EACH)
    with (folder / _LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def is_up(folder: Path, group: int) -> bool:
    """Whether a process of this group has said so. group: each that takes turns has its own."""
    return (folder / f"{group}{_UP}").exists()
