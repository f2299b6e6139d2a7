"""CUDA C++ kernels on a CPU, compiled with the headers of tests/kernels/emulator."""

from __future__ import annotations

import ctypes
import hashlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from torch import Tensor

from specengine.kernels.cuda import program
from specengine.kernels.cuda.program import Argument

COMPILER = (shutil.which("c++") or shutil.which("g++")) if sys.platform == "linux" else None
SHARED_BYTES = 227 * 1024  # the most that a block of an H100 or H200 may have

_HEADERS = Path(__file__).parent / "emulator"
_SOURCES = Path(program.__file__).parent
_FLAGS = ["-std=c++17", "-Og", "-w", "-fPIC", "-fno-exceptions"]

Compiled = Callable[[Path, str, tuple[tuple[str, int], ...], int, int], "EmulatedKernel"]


@dataclass(frozen=True)
class EmulatedKernel:
    """Stands for program.Kernel."""

    library: ctypes.CDLL

    def launch(
        self,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        arguments: Sequence[Argument],
    ) -> None:
        """Blocks begin in an order that is drawn; eight run by turns."""
        assert shared_bytes <= SHARED_BYTES
        assert grid[2] == 1
        count = grid[0] * grid[1]
        order = random.Random(0).sample(range(count), count)
        values = [_value(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(v) for v in values])
        drawn = (ctypes.c_int * count)(*order)
        self.library.launch(*grid[:2], drawn, threads, shared_bytes, pointers)


def _value(argument: Argument) -> ctypes.c_void_p | ctypes.c_int | ctypes.c_float:
    if argument is None or isinstance(argument, Tensor):
        return ctypes.c_void_p(None if argument is None else argument.data_ptr())
    return ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_int(argument)


def digest_of_sources() -> str:
    """A digest of all that a library is made of, but its name: another digest, another library."""
    version = subprocess.run([str(COMPILER), "--version"], check=True, capture_output=True).stdout
    found = hashlib.sha256(version + " ".join(_FLAGS).encode())
    for path in sorted([*_SOURCES.glob("*.cu*"), *_HEADERS.iterdir(), Path(__file__)]):
        if path.is_file():
            found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()[:16]


def compiler_into(folder: Path, libraries: Path) -> Compiled:
    """What stands for program.compiled. folder: of this process. libraries: where those are kept
    that any process has made of these sources."""
    library = _libraries_into(folder, libraries)
    return lambda *given: EmulatedKernel(ctypes.CDLL(str(library(*given))))


def compiler_of_ranks(folder: Path, libraries: Path, rank: Callable[[], int]) -> Compiled:
    """As compiler_into, for threads that stand for ranks: each has a copy of a library, which runs
    one launch at a time. rank: of the thread that asks."""
    library, one_at_a_time = _libraries_into(folder, libraries), Lock()

    def compiled(*given: Any) -> EmulatedKernel:
        with one_at_a_time:
            made = library(*given)
            own = folder / f"rank{rank()}-{made.name}"
            if not own.exists():
                shutil.copy(made, own)
        return EmulatedKernel(ctypes.CDLL(str(own)))

    return compiled


def _libraries_into(folder: Path, libraries: Path) -> Callable[..., Path]:
    """Makes the library of a kernel's form, where none is there."""

    common = libraries / "common"

    def compile_(place: Path, *given: str) -> None:
        subprocess.run([str(COMPILER), *_FLAGS, *given], check=True, cwd=place)

    def prepare(sources: Path) -> None:
        """What all libraries have in common, once for all processes."""
        made = Path(tempfile.mkdtemp(dir=libraries))
        for header in (*sources.glob("*.cu*"), *_HEADERS.iterdir()):
            shutil.copy(header, made)
        compile_(made, "-x", "c++-header", "cuda.h", "-o", "cuda.h.gch")
        compile_(made, "-c", "runtime.cpp")
        try:
            made.rename(common)
        except OSError:  # another process was first
            shutil.rmtree(made)

    def library(
        source: Path, name: str, defines: tuple[tuple[str, int], ...], shared: int, device: int
    ) -> Path:
        assert shared <= SHARED_BYTES
        file = "-".join([name, *(f"{k}{v}" for k, v in defines)]) + ".so"
        if not (libraries / file).exists():
            if not common.exists():
                prepare(source.parent)
            given = {**dict(defines), "KERNEL": name, "SOURCE": f'"{source.name}"'}
            lines = [f"#define {key} {value}" for key, value in given.items()]
            unit = "\n".join(['#include "cuda.h"', *lines, '#include "launch.cpp"', ""])
            (folder / "unit.cpp").write_text(unit)
            runtime = str(common / "runtime.o")
            compile_(folder, f"-I{common}", "-shared", "-o", file, "unit.cpp", runtime)
            part = Path(shutil.copy(folder / file, libraries / f"{file}.{os.getpid()}"))
            part.replace(libraries / file)
        return libraries / file

    return library
