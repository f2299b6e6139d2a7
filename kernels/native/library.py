"""Compiles the C files of this folder once for this machine, and finds them again."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
FLAGS = [
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
]
# linear.c shares PyTorch's OpenMP threads: libgomp is loaded under one name. suffix.c and sample.c
# round every product, as Python and PyTorch do.
OPTIONS = {
    "ops": ["-fopenmp-simd"],
    "linear": ["-fopenmp"],
    "suffix": ["-ffp-contract=off"],
    "sample": ["-ffp-contract=off"],
}
# What takes microseconds keeps the GIL: beside a busy thread it is 5 ms until that comes back.
_LOADERS = {"lookup": ctypes.PyDLL, "suffix": ctypes.PyDLL}


@cache
def library(name: str = "ops") -> ctypes.CDLL | None:
    """The compiled operations of <name>.c; None without a C compiler, or with SPECENGINE_NATIVE=0.
    Their place is the cache directory (SPECENGINE_CACHE_DIR), under a name that source, flags and
    processor decide."""
    if os.environ.get("SPECENGINE_NATIVE") == "0":
        return None
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        logger.info("no C compiler: small CPU operations run in Python, which is slower")
        return None
    try:
        return _LOADERS.get(name, ctypes.CDLL)(str(_compiled(name, compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("%s.c could not be compiled; Python runs instead: %s", name, error)
        return None


def _compiled(name: str, compiler: str) -> Path:
    folder = Path(os.environ.get("SPECENGINE_CACHE_DIR") or Path.home() / ".cache" / "specengine")
    source = FOLDER / f"{name}.c"
    command = [compiler, *FLAGS, *OPTIONS.get(name, [])]
    path = folder / "native" / f"{name}-{_fingerprint(source, command)}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as work:
            made = Path(work) / f"{name}.so"
            command += ["-o", str(made), str(source), "-lm"]
            subprocess.run(command, check=True, capture_output=True, timeout=120)
            made.replace(path)  # atomic: another process may be doing the same
    return path


def _fingerprint(source: Path, command: list[str]) -> str:
    """-march=native compiles for the processor at hand, and a home directory may be shared."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = [line for line in lines if line.startswith(("model name", "flags"))][:2]
    except OSError:
        processor = [platform.processor()]
    parts = [source.read_text(), *command, platform.machine(), *processor]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
