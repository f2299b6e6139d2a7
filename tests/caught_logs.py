"""pytest's capture of logs in a fraction of the time. At each phase of each test pytest 9 looks
through all loggers, and adds two handlers to each that does not propagate to the root: hundreds,
of which fifty are PyTorch's. Here it looks once a test, and PyTorch's propagate."""

from __future__ import annotations

import logging
from typing import Any

_apart: list[logging.Logger] = []  # those that do not propagate


def quicken() -> None:
    """From now on, in this process; a pytest that has another way takes the time it does."""
    from _pytest.logging import catching_logs

    if "attached_loggers" in getattr(catching_logs, "__slots__", ()):
        catching_logs.__enter__ = _enter  # type: ignore[method-assign]


def look_again() -> None:
    """Before a test: the loggers that do not propagate."""
    loggers = [*logging.root.manager.loggerDict.values()]
    apart = [one for one in loggers if isinstance(one, logging.Logger) and not one.propagate]
    for one in apart:
        one.propagate = one.name.partition(".")[0] == "torch"
    _apart[:] = [one for one in apart if not one.propagate]


def _enter(self: Any) -> Any:
    root = logging.getLogger()
    if self.level is not None:
        self.handler.setLevel(self.level)
        self.orig_level = root.level
        root.setLevel(min(root.level, self.level))
    for one in (root, *_apart):
        one.addHandler(self.handler)
        self.attached_loggers.append(one)
    return self.handler
