"""Ctrl-C and SIGTERM ask a run to end after the step at hand."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

logger = logging.getLogger(__name__)


class StopRequest:
    """signum: of the signal that came, 0 for none."""

    def __init__(self) -> None:
        self.signum = 0

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self.signum:
            raise KeyboardInterrupt
        self.signum = signum
        logger.warning("stopping: the step at hand, then a checkpoint; once more to stop at once")


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """The signals mean something else again afterwards. Threads other than the main one cannot
    listen: there the request never comes."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(one, request) for one in signals]
    try:
        yield request
    finally:
        for one, handler in zip(signals, before, strict=True):
            signal.signal(one, handler)
