"""CUDA C++ kernels on a CPU, compiled with the headers of tests/kernels/emulator."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

from torch import Tensor

from specengine.kernels.cuda import program
from specengine.kernels.cuda.program import Argument
from specengine.kernels.cuda.tensor_map import TensorMap

COMPILER = (shutil.which("c++") or shutil.which("g++")) if sys.platform == "linux" else None
SHARED_BYTES = 227 * 1024  # the most that a block of an H100 or H200 may have

_HEADERS = Path(__file__).parent / "emulator"
_SOURCES = Path(program.__file__).parent
_FLAGS = ["-std=c++17", "-w", "-fPIC", "-fno-exceptions"]
_QUICKLY = ["-Og"]  # compiled often, and run little
_WELL = ["-O2", "-fvisibility=hidden"]  # compiled once for all kernels
# None is linked with C++'s library, which takes longer than to compile a small kernel.
_LINKED = ["-shared", "-nodefaultlibs"]

Compiled = Callable[[Path, str, tuple[tuple[str, int], ...], int, int], "EmulatedKernel"]


@dataclass(frozen=True)
class EmulatedKernel:
    """Stands for program.Kernel."""

    library: ctypes.CDLL
    seed: int = 0  # of what is late, and how long; 0: no thread is

    def launch(
        self,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        arguments: Sequence[Argument],
    ) -> None:
        """Blocks begin in an order that is drawn; sixteen run by turns."""
        assert shared_bytes <= SHARED_BYTES
        assert grid[2] == 1
        count = grid[0] * grid[1]
        order = random.Random(0).sample(range(count), count)
        values = [_value(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(v) for v in values])
        drawn = (ctypes.c_int * count)(*order)
        launch = self.library.launch
        launch.restype = ctypes.c_bool
        ended = launch(*grid[:2], drawn, threads, shared_bytes, self.seed, pointers)
        assert ended, f"seed {self.seed}: all threads wait for each other"


class _TensorMap(ctypes.Structure):
    """As emulator/ptx.cuh has it."""

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("sizes", ctypes.c_int32 * 4),
        ("strides", ctypes.c_int64 * 4),
        ("box", ctypes.c_int32 * 4),
    )


def _value(
    argument: Argument,
) -> ctypes.c_void_p | ctypes.c_int | ctypes.c_float | ctypes.Structure:
    if isinstance(argument, TensorMap):
        of = argument
        return _TensorMap(
            of.address,
            (ctypes.c_int32 * 4)(*of.sizes),
            (ctypes.c_int64 * 4)(1, *of.strides),
            (ctypes.c_int32 * 4)(*of.box),
        )
    if argument is None or isinstance(argument, Tensor):
        return ctypes.c_void_p(None if argument is None else argument.data_ptr())
    return ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_int(argument)


def digest_of_sources() -> str:
    """A digest of all that a library is made of, but its name: another digest, another library."""
    version = subprocess.run([str(COMPILER), "--version"], check=True, capture_output=True).stdout
    found = hashlib.sha256(version + " ".join([*_FLAGS, *_QUICKLY, *_WELL]).encode())
    for path in sorted([*_SOURCES.glob("*.cu*"), *_HEADERS.iterdir(), Path(__file__)]):
        if path.is_file():
            found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()[:16]


@cache
def _find_library_of_cpp() -> None:
    """For all libraries of kernels: none names it."""
    ctypes.CDLL("libstdc++.so.6", mode=ctypes.RTLD_GLOBAL)


def compiler_into(folder: Path, libraries: Path) -> Compiled:
    """What stands for program.compiled. folder: of this process. libraries: where those are kept
    that any process has made of these sources."""
    _find_library_of_cpp()
    library = _libraries_into(folder, libraries)
    return lambda *given: EmulatedKernel(ctypes.CDLL(str(library(*given))))


def compiler_of_ranks(folder: Path, libraries: Path, rank: Callable[[], int]) -> Compiled:
    """As compiler_into, for threads that stand for ranks: each has a copy of a library, which runs
    one launch at a time. rank: of the thread that asks."""
    _find_library_of_cpp()
    library, one_at_a_time = _libraries_into(folder, libraries), Lock()

    def compiled(*given: Any) -> EmulatedKernel:
        with one_at_a_time:
            made = library(*given)
            own = folder / f"rank{rank()}-{made.name}"
            if not own.exists():
                shutil.copy(made, own)
        return EmulatedKernel(ctypes.CDLL(str(own)))

    return compiled


@contextmanager
def _one_process(lock: Path) -> Iterator[None]:
    """Others wait, and then find what it has made."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _libraries_into(folder: Path, libraries: Path) -> Callable[..., Path]:
    """Makes the library of a kernel's form, where none is there."""

    common = libraries / "common"
    compiled_once = [str(common / f"{name}.o") for name in ("runtime", "instructions")]

    def compile_(place: Path, *given: str) -> None:
        subprocess.run([str(COMPILER), *_FLAGS, *given], check=True, cwd=place)

    def prepare(sources: Path) -> None:
        """What all libraries have in common."""
        made = libraries / "common.part"
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir()
        for header in (*sources.glob("*.cu*"), *_HEADERS.iterdir()):
            shutil.copy(header, made)
        compile_(made, *_QUICKLY, "-x", "c++-header", "cuda.h", "-o", "cuda.h.gch")
        for once in compiled_once:
            compile_(made, *_WELL, "-c", f"{Path(once).stem}.cpp")
        made.rename(common)

    def library(
        source: Path, name: str, defines: tuple[tuple[str, int], ...], shared: int, device: int
    ) -> Path:
        assert shared <= SHARED_BYTES
        file = "-".join([name, *(f"{k}{v}" for k, v in defines)]) + ".so"
        if (libraries / file).exists():
            return libraries / file
        with _one_process(libraries / "common.lock"):
            if not common.exists():
                prepare(source.parent)
        with _one_process(libraries / f"{file}.lock"):
            if not (libraries / file).exists():
                given = {**dict(defines), "KERNEL": name, "SOURCE": f'"{source.name}"'}
                lines = [f"#define {key} {value}" for key, value in given.items()]
                unit = "\n".join(['#include "cuda.h"', *lines, '#include "launch.cpp"', ""])
                (folder / "unit.cpp").write_text(unit)
                part = libraries / f"{file}.part"
                linked = *_LINKED, "-o", str(part), "unit.cpp", *compiled_once, "-lm", "-lc"
                compile_(folder, *_QUICKLY, f"-I{common}", *linked)
                part.replace(libraries / file)
        return libraries / file

    return library
