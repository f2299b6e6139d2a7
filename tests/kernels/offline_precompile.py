"""Precompiles a Triton kernel for Hopper; for a process of its own. Prints what
was seen."""

from __future__ import annotations

import json
import sys
import threading

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from specengine.kernels.kv.row_places_triton import _row_places_kernel, row_places
from specengine.kernels.precompile import precompile
from tests.kernels import offline_triton

TABLE = torch.ones(4, 64, dtype=torch.int32)
ROWS = torch.ones(4, dtype=torch.int64)


launchers: list[bool] = []


def make_launcher(*_: object) -> object:
    """A launcher is C, and compiled when it is asked for: not by whom the kernels are for."""
    launchers.append(threading.current_thread() is threading.main_thread())
    return object()


def no_room(*_: object) -> None:
    raise MemoryError


def run() -> dict[str, object]:
    with precompile() as stage:
        for width in (3, 3, 4, 16):
            places = row_places(TABLE, ROWS, ROWS, width, 0, None)
        compiles = stage.compiles()
    kernels = len(_row_places_kernel.device_caches[0][0])
    return {
        "compiles": compiles,
        "compiled": stage.tally.kernels,
        "in process": kernels,
        "slots": places.slots_T.tolist(),
    }


def compilers() -> list[str]:
    """PyTorch's, and what comes with it: those that are imported."""
    with precompile():
        torch.empty(3).add_(1)
    return [name for name in ("torch._dynamo", "sympy") if name in sys.modules]


def main() -> None:
    found = compilers()
    offline_triton.use()
    driver.active.launcher_cls = make_launcher
    launch = JITFunction.run
    first, again = run(), run()
    _row_places_kernel.device_caches.clear()
    from_disk = run()
    restored, made = JITFunction.run is launch, [*launchers]
    _row_places_kernel.device_caches.clear()
    driver.active.utils.load_binary = no_room
    broken = run()
    seen = {"first": first, "again": again, "disk": from_disk, "restored": restored}
    seen |= {"compilers": found}
    print(json.dumps(seen | {"launchers": made, "broken": broken}))


if __name__ == "__main__":
    main()
