"""Which implementation of an operation runs."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from specengine.kernels.native import ops as native

Backend = Literal["auto", "torch", "triton", "native", "cuda", "sgl"]


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def interprets_triton() -> bool:
    """Whether Triton's kernels run on a CPU, in its interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def use_triton(backend: Backend, x: Tensor) -> bool:
    """ "auto" is Triton for CUDA tensors where it is installed, else PyTorch. "triton" on a CPU
    tensor works only in Triton's interpreter (TRITON_INTERPRET=1)."""
    if backend == "auto":
        return x.is_cuda and has_triton()
    return backend == "triton"


def use_native(backend: Backend, x: Tensor) -> bool:
    """ "auto" is the compiled C form for few rows on a CPU, where a compiler made it."""
    return backend == "native" or (backend == "auto" and native.fits(x))


@cache
def _is_hopper(device_index: int) -> bool:
    return torch.cuda.get_device_capability(device_index) >= (9, 0)


def has_dependent_launch(x: Tensor) -> bool:
    """Whether a kernel on x's device may start before the one ahead of it has ended, and wait for
    it inside (programmatic dependent launch)."""
    return x.is_cuda and _is_hopper(x.device.index or 0)


@cache
def _has_warpgroups(device_index: int) -> bool:
    return torch.cuda.get_device_capability(device_index) == (9, 0)


def has_warpgroups(x: Tensor) -> bool:
    """Whether x's device multiplies by four warps together (wgmma): Hopper, and none after it."""
    return x.is_cuda and _has_warpgroups(x.device.index or 0)


class _Device:
    is_shared = False


def share_device() -> None:
    """From now on kernels of this process may be launched on a part of the multiprocessors."""
    _Device.is_shared = True
    has_whole_device.cache_clear()


@cache
def has_whole_device() -> bool:
    """Whether a block on each multiprocessor runs at the same time, whatever else does. Under
    NVIDIA's MPS kernels of other processes run beside ours, and blocks that wait for each other
    would wait for ever, each process holding what the other needs. So they would on a part of the
    multiprocessors (share_device)."""
    mps = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    return not _Device.is_shared and not mps.exists()


MOST_SHARED = 227 * 1024  # bytes of shared memory that a block of an H100 or H200 may have


@cache
def _shared_bytes(device_index: int) -> int:
    properties = torch.cuda.get_device_properties(device_index)
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]


def has_much_shared(x: Tensor) -> bool:
    """Whether a block on x's device may have MOST_SHARED: later cards may have less."""
    return x.is_cuda and _shared_bytes(x.device.index or 0) >= MOST_SHARED


@cache
def multiprocessors(device: torch.device) -> int:
    """1 for the interpreter, which runs a program at a time."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def shared_bytes(device: torch.device) -> int:
    """Bytes of shared memory that a program may have at most."""
    if device.type != "cuda":
        return 1 << 30
    found: Any = torch.cuda.get_device_properties(device)
    return int(found.shared_memory_per_block_optin)
