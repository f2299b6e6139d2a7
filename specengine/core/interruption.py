"""Long pieces of background work that end early when something else comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident

import torch


class CaptureInterrupted(Exception):
    """Work has come, and the graph that was being captured is given up."""


_wanted: dict[int, Callable[[], bool]] = {}  # by thread


@contextmanager
def interruptible(is_wanted: Callable[[], bool]) -> Iterator[None]:
    """Captures of this thread end with CaptureInterrupted, at their next `interruption_point`, once
    is_wanted() holds."""
    _wanted[get_ident()] = is_wanted
    try:
        yield
    finally:
        del _wanted[get_ident()]


def interruption_point() -> None:
    """Called between the parts of what is captured, before each layer too: a capture of a whole
    round or of a long prompt takes 10 to 100 ms of the host, which a request must not wait for.
    Raises CaptureInterrupted. In what torch.compile traces there are none."""
    if not _wanted or torch.compiler.is_compiling():
        return
    is_wanted = _wanted.get(get_ident())
    if is_wanted is not None and is_wanted():
        raise CaptureInterrupted
