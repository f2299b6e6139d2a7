"""Compiles CUDA C++ at first use (NVRTC) and launches it, with dependent launch where wanted."""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specengine.kernels import compilations, precompile
from specengine.kernels.cuda.tensor_map import TensorMap, encoded

Argument = Tensor | TensorMap | int | float | None
_PORTABLE_CLUSTER = 8  # blocks that every GPU with clusters takes


@cache
def available() -> bool:
    """Whether CUDA C++ can be compiled: NVIDIA's Python bindings are installed."""
    return find_spec("cuda") is not None and find_spec("cuda.bindings") is not None


@dataclass(frozen=True)
class Kernel:
    """One compiled function, loaded on one device."""

    function: Any

    def launch(
        self,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        arguments: Sequence[Argument],
    ) -> None:
        """On the current stream. It may start before the kernel ahead has ended, and has to wait
        for it (griddepcontrol.wait) before it reads what that one writes."""
        from cuda.bindings import driver

        attribute = driver.CUlaunchAttribute()
        attribute.id = (
            driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        )
        attribute.value.programmaticStreamSerializationAllowed = 1
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared_bytes
        config.hStream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
        config.attrs, config.numAttrs = [attribute], 1
        values = tuple(_value(argument) for argument in arguments)
        types = tuple(_type(argument) for argument in arguments)
        _check(driver.cuLaunchKernelEx(config, self.function, (values, types), 0))


def _value(argument: Argument) -> Any:
    if argument is None:
        return 0
    if isinstance(argument, TensorMap):
        return encoded(argument)
    return argument.data_ptr() if isinstance(argument, Tensor) else argument


def _type(argument: Argument) -> Any:
    if argument is None or isinstance(argument, Tensor):
        return ctypes.c_void_p
    if isinstance(argument, TensorMap):
        return None  # the bindings take the struct as it is
    return ctypes.c_float if isinstance(argument, float) else ctypes.c_int


class PendingKernel(Kernel):
    """A function on its way. Launching it does nothing."""

    def launch(self, *_: object) -> None: ...


def compiled(
    source: Path, name: str, defines: tuple[tuple[str, int], ...], shared_bytes: int, device: int
) -> Kernel:
    """The function `name` of a source file. shared_bytes: the most that a launch asks for."""
    stage = precompile.current()
    if stage is None:
        return _loaded(source, name, defines, shared_bytes, device)
    stage.ask((source, defines, device), partial(_binary, source, defines, device))
    return PendingKernel(None)


@cache
def _loaded(
    source: Path, name: str, defines: tuple[tuple[str, int], ...], shared_bytes: int, device: int
) -> Kernel:
    from cuda.bindings import driver

    torch.cuda.init()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        torch.cuda.current_stream()
        module = _check(driver.cuModuleLoadData(_binary(source, defines, device)))
        function = _check(driver.cuModuleGetFunction(module, name.encode()))
        kind = driver.CUfunction_attribute
        limit = kind.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(driver.cuFuncSetAttribute(function, limit, shared_bytes))
        if dict(defines).get("CLUSTER", 1) > _PORTABLE_CLUSTER:
            allowed = kind.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            _check(driver.cuFuncSetAttribute(function, allowed, 1))
    return Kernel(function)


def _binary(source: Path, defines: tuple[tuple[str, int], ...], device: int) -> bytes:
    """Machine code, kept in the cache directory (SPECENGINE_CACHE_DIR) under a name that source,
    headers beside it, options and architecture decide."""
    major, minor = torch.cuda.get_device_capability(device)
    # Hopper's products of four warps exist under a name of their own.
    special = "a" if (major, minor) == (9, 0) else ""
    options = [
        f"--gpu-architecture=sm_{major}{minor}{special}",
        *(f"-D{k}={v}" for k, v in defines),
    ]
    text = source.read_text()
    headers = {path.name: path.read_text() for path in sorted(source.parent.glob("*.cuh"))}
    parts = [text, *headers.values(), *options]
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("SPECENGINE_CACHE_DIR") or Path.home() / ".cache" / "specengine")
    path = folder / "cuda" / f"{source.stem}-{key}.cubin"
    if path.exists():
        return path.read_bytes()
    binary = _compile(text, source.name, headers, options)
    compilations.note()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as made:
        made.write(binary)
    Path(made.name).replace(path)  # atomic: another process may be doing the same
    return binary


def _compile(text: str, name: str, headers: dict[str, str], options: list[str]) -> bytes:
    from cuda.bindings import nvrtc

    included = [part.encode() for part in headers.values()]
    names = [part.encode() for part in headers]
    program = _check(
        nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), len(names), included, names)
    )
    encoded = [option.encode() for option in options]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = b" " * _check(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"{name} does not compile:\n{log.decode()}")
    binary = b" " * _check(nvrtc.nvrtcGetCUBINSize(program))
    _check(nvrtc.nvrtcGetCUBIN(program, binary))
    return bytes(binary)


def _check(result: tuple[Any, ...]) -> Any:
    """The value of a call into CUDA. Raises RuntimeError, naming the status."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"CUDA call failed: {status}")
    return values[0] if values else None
