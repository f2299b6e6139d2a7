"""Where and with what a measurement was made."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from specengine.core.machine import cpu_name
from specengine.draft.train.data.manifest import file_sha256

COMMIT_VARIABLE = "SPECENGINE_COMMIT"
_PACKAGES = ("torch", "transformers", "triton")


def environment(program: str = "python") -> dict[str, Any]:
    """Hardware, versions, commit and command line of this run."""
    import torch

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    arguments = sys.argv if program == "python" else sys.argv[1:]
    return {
        "command": " ".join([program, *map(shlex.quote, arguments)]),
        "commit": _commit(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
    }


def environment_line(facts: dict[str, Any]) -> str:
    """All but the command line, in one sentence."""
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items() if number)
    return (
        f"commit {facts['commit']}, {facts['gpu'] or facts['cpu']} ({facts['cores']} cores, "
        f"{facts['threads']} threads), Python {facts['python']}, {versions}"
    )


def process_seconds() -> float | None:
    """Since this process started; None where the system does not tell."""
    try:
        # The fields after the command's name, which may hold anything, in brackets.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def sha256_of_files(paths: list[Path]) -> str:
    """A file's SHA-256, as sha256sum prints it; for several that of their names and hashes, a
    `hash  name` line each, in order of names."""
    if len(paths) == 1:
        return file_sha256(paths[0])
    lines = [f"{file_sha256(path)}  {path.name}\n" for path in sorted(paths)]
    return sha256_of_text("".join(lines))


def sha256_of_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit() -> str:
    """SPECENGINE_COMMIT replaces it where the sources lie without their history."""
    if COMMIT_VARIABLE in os.environ:
        return os.environ[COMMIT_VARIABLE]
    command = ["git", "describe", "--always", "--dirty"]
    here = Path(__file__).parent
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=here, check=False)
    except OSError:  # no git
        return "unknown"
    return done.stdout.strip() or "unknown"
