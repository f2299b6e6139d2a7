"""Triton in a process without a GPU and without its interpreter: compiles for Hopper, and cannot
launch. Tensors are those of the CPU.

OFFLINE_TRITON: a folder with another Triton than the environment's, such as that of the PyTorch on
the card, which compiles otherwise (`pip install --no-deps --target FOLDER triton==3.6.0`)."""

from __future__ import annotations

import gc
import json
import os
import runpy
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any


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
    caches = {"TRITON_CACHE_DIR": str(folder / "triton"), "SPECENGINE_CACHE_DIR": str(folder)}
    with tempfile.TemporaryDirectory() as place:
        out, err = Path(place, "out"), Path(place, "err")
        asked = [module, *arguments], _environment() | caches, str(out), str(err)
        starter = _starter()
        assert starter.stdin is not None
        assert starter.stdout is not None
        starter.stdin.write(json.dumps(asked) + "\n")
        starter.stdin.flush()
        status = starter.stdout.readline().strip()
        assert status == "0", err.read_text()
        return json.loads(out.read_text().splitlines()[-1])


def _environment() -> dict[str, str]:
    other = os.environ.get("OFFLINE_TRITON")
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return kept | ({"PYTHONPATH": other} if other else {})


@cache
def _starter() -> subprocess.Popen[str]:
    """A process that has imported PyTorch and Triton, which takes two seconds, and starts the
    others; it ends with this one."""
    return subprocess.Popen(
        [sys.executable, "-c", f"from {__name__} import start; start()"],
        env=_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


def start() -> None:
    """Of each line a process that runs a module; prints how it ended."""
    import torch  # noqa: F401
    import triton  # noqa: F401

    gc.set_threshold(10_000, 10, 10)
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            _run_module(*json.loads(line))
        print(os.waitpid(child, 0)[1], flush=True)


def _run_module(arguments: list[str], environment: dict[str, str], out: str, err: str) -> None:
    for path, number in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    status = 1
    try:
        os.environ.clear()
        os.environ.update(environment)
        sys.argv[:] = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
