"""Programs of tests, for processes of their own."""

from __future__ import annotations

import sys

# What is imported stays: it is looked through for garbage as rarely as where tests run, and at the
# end it is not taken down object by object.
_RUN = """
import atexit, gc, os, runpy, sys
gc.set_threshold(10_000, 10, 10)
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
atexit._run_exitfuncs()
sys.stdout.flush()
os._exit(0)
"""


def program(module: str) -> list[str]:
    """The command of a module, to which its arguments are added."""
    return [sys.executable, "-c", _RUN, module]
