"""Compiles ops.c once for this machine, and finds it again."""

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

SOURCE = Path(__file__).parent / "ops.c"
FLAGS = [
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp-simd",
    "-shared",
    "-fPIC",
]


@cache
def library() -> ctypes.CDLL | None:
    """The compiled operations; None without a C compiler, or with SPECENGINE_NATIVE=0. Their place
    is the cache directory (SPECENGINE_CACHE_DIR), under a name that source, flags and processor
    decide."""
    if os.environ.get("SPECENGINE_NATIVE") == "0":
        return None
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        logger.info("no C compiler: small CPU operations run in PyTorch, which is slower")
        return None
    try:
        return ctypes.CDLL(str(_compiled(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("%s could not be compiled; PyTorch runs instead: %s", SOURCE.name, error)
        return None


def _compiled(compiler: str) -> Path:
    folder = Path(os.environ.get("SPECENGINE_CACHE_DIR") or Path.home() / ".cache" / "specengine")
    path = folder / "native" / f"ops-{_fingerprint(compiler)}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as work:
            made = Path(work) / "ops.so"
            command = [compiler, *FLAGS, "-o", str(made), str(SOURCE), "-lm"]
            subprocess.run(command, check=True, capture_output=True, timeout=120)
            made.replace(path)  # atomic: another process may be doing the same
    return path


def _fingerprint(compiler: str) -> str:
    """-march=native compiles for the processor at hand, and a home directory may be shared."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = [line for line in lines if line.startswith(("model name", "flags"))][:2]
    except OSError:
        processor = [platform.processor()]
    parts = [SOURCE.read_text(), compiler, *FLAGS, platform.machine(), *processor]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
