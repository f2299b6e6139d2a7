"""Long pieces of background work that end early when something else comes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class CaptureInterrupted(Exception):
    """Work has come, and the graph that was being captured is given up."""


class _Interruption(threading.local):
    is_wanted: Callable[[], bool] | None = None


_interruption = _Interruption()


@contextmanager
def interruptible(is_wanted: Callable[[], bool]) -> Iterator[None]:
    """Captures of this thread end with CaptureInterrupted, at their next `interruption_point`, once
    is_wanted() holds."""
    _interruption.is_wanted = is_wanted
    try:
        yield
    finally:
        _interruption.is_wanted = None


def interruption_point() -> None:
    """Called between the parts of what is captured, before each layer too: a capture of a whole
    round or of a long prompt takes 10 to 100 ms of the host, which a request must not wait for.
    Raises CaptureInterrupted. In what torch.compile traces there are none."""
    if torch.compiler.is_compiling():
        return
    if _interruption.is_wanted is not None and _interruption.is_wanted():
        raise CaptureInterrupted
