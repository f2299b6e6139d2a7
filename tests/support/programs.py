"""Programs of tests, for processes of their own."""

from __future__ import annotations

import sys

# What is imported stays: it is looked through for garbage as rarely as where tests run.
_START = "import gc, runpy, sys; gc.set_threshold(10_000, 10, 10)"
_RUN = "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"


def program(module: str) -> list[str]:
    """The command of a module, to which its arguments are added."""
    return [sys.executable, "-c", f"{_START}; {_RUN}", module]
