"""Triton in a process without a GPU and without its interpreter: compiles for Hopper, and cannot
launch. Tensors are those of the CPU.

OFFLINE_TRITON: a folder with another Triton than the environment's, such as that of the PyTorch on
the card, which compiles otherwise (`pip install --no-deps --target FOLDER triton==3.6.0`)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support.programs import program


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
        [*program(module), *arguments],
        env=environment | caches,
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
