"""Triton in a process without a GPU and without its interpreter: compiles for Hopper, and cannot
launch. Tensors are those of the CPU.

OFFLINE_TRITON: a folder with another Triton than the environment's, such as that of the PyTorch on
the card, which compiles otherwise (`pip install --no-deps --target FOLDER triton==3.6.0`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Runs a module without looking through its objects for garbage, of which there is little: half a
# million stay. At the end they are not taken down one by one.
QUICK = """
import gc, os, runpy, sys
gc.disable()
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
sys.stdout.flush()
os._exit(0)
"""


class Hopper:
    """What Triton asks of a driver before it launches."""

    def __init__(self) -> None:
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 232_448},
            load_binary=lambda *_: (object(), 1, 32, 0, 1024),
        )

    def launcher_cls(self, source: Any, metadata: Any) -> object:
        """What would launch."""
        return object()

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def use() -> None:
    from triton.runtime import driver

    driver.set_active(Hopper())


def run(module: str, folder: Path, *arguments: str) -> Any:
    """What `module` prints, as JSON, in a process whose caches lie in `folder`."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    caches = {"TRITON_CACHE_DIR": str(folder / "triton"), "SPECENGINE_CACHE_DIR": str(folder)}
    if other := os.environ.get("OFFLINE_TRITON"):
        caches["PYTHONPATH"] = other
    done = subprocess.run(
        [sys.executable, "-c", QUICK, module, *arguments],
        env=environment | caches,
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
