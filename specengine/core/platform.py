"""What an engine asks of the hardware it runs on: graphs, streams, events, memory, names.

A new accelerator is one file with a `Platform`, and one line in `PLATFORMS` of core/registry.py.
Its name there is that of torch.device. Kernels are chosen by tensor, in kernels/dispatch.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from specengine.core.errors import ConfigError, SpecEngineError
from specengine.core.region import Region
from specengine.core.registry import PLATFORMS, load_place

T = TypeVar("T")


class Event(Protocol):
    """torch.cuda.Event, as far as it is used."""

    def record(self, stream: Any = None) -> None:
        """Behind what the stream, else the current one, was given so far."""
        ...

    def synchronize(self) -> None:
        """The host waits for what was recorded."""
        ...

    def query(self) -> bool:
        """Whether that has passed."""
        ...

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this event to `end`; both were made with timing=True."""
        ...


class Stream(Protocol):
    """torch.cuda.Stream, as far as it is used."""

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...


class Graph(Protocol):
    """torch.cuda.CUDAGraph, as far as it is used; or several that are replayed together."""

    def replay(self) -> object: ...


@dataclass(frozen=True)
class KernelSpan:
    """One kernel that ran, or a copy or fill."""

    name: str
    microseconds: float


class DeviceMemory(ABC):
    """Readings of one device, in bytes."""

    @abstractmethod
    def total(self) -> int: ...

    @abstractmethod
    def used(self) -> int:
        """In use now, after the allocator has freed its cached blocks: by every process on an
        accelerator, by this process on a CPU."""

    @abstractmethod
    def current(self) -> int:
        """Held by tensors; on a CPU the same as `used`."""

    @abstractmethod
    def peak(self) -> int:
        """The most held by tensors since `reset_peak`; on a CPU since the process began."""

    @abstractmethod
    def reset_peak(self) -> None: ...


class Platform(ABC):
    """One kind of device. The same object serves all threads of a process."""

    # Work runs beside the host, in memory of its own: results are late, and copies cost.
    is_accelerator = False
    # Launches can be captured in graphs, whose replays read and write fixed addresses.
    has_graphs = False
    # Triton kernels can be compiled before they are launched (kernels/precompile.py).
    precompiles = False
    # What --attention-backend auto takes, of core.registry.ATTENTION_BACKENDS; None: by measurement
    # among those of an NVIDIA GPU.
    attention_backend: str | None = "torch"

    # Devices

    @abstractmethod
    def is_available(self) -> bool: ...

    @abstractmethod
    def num_devices(self) -> int: ...

    @abstractmethod
    def device_name(self, device: torch.device) -> str:
        """What a figure measured on it is filed under."""

    @abstractmethod
    def use_device(self, index: int) -> None:
        """Make it this thread's current device of the kind."""

    # Memory

    @abstractmethod
    def memory(self, device: torch.device) -> DeviceMemory: ...

    @abstractmethod
    def free_memory(self) -> int:
        """Bytes that nothing uses on the current device, the allocator's cached blocks not
        counted."""

    def held_memory(self) -> int:
        """Bytes of the current device that this process's allocator holds, its cached blocks
        counted; 0 where that is not known."""
        return 0

    @abstractmethod
    def empty_cache(self) -> None:
        """The allocator gives its cached blocks back."""

    @abstractmethod
    def pinned(self, values: Tensor) -> Tensor:
        """values, from pageable memory of the host, in a copy that the device can read by itself;
        values itself where the device is the host."""

    def new_region(self) -> Region:
        """Memory that can be given back. Raises ConfigError where this platform has none."""
        raise ConfigError(f"--enable-sleep-mode: {type(self).__name__} cannot give memory back")

    # Order

    @abstractmethod
    def synchronize(self) -> None:
        """The host waits for all that the current device was given."""

    @abstractmethod
    def new_event(self, timing: bool = False) -> Event: ...

    @abstractmethod
    def new_stream(self) -> Stream | None:
        """None where there is only one."""

    @abstractmethod
    def current_stream(self) -> Stream: ...

    @abstractmethod
    def on_stream(self, stream: Any) -> AbstractContextManager[object]:
        """What the body launches goes to that stream."""

    @abstractmethod
    def read_on(self, tensor: Tensor, stream: Any) -> None:
        """A stream reads a tensor that was made on another. Once the tensor is gone, its memory is
        given to others behind what the stream was given by then."""

    # Graphs

    @abstractmethod
    def graph_pool(self) -> Any:
        """A new pool of memory that graphs share."""

    @abstractmethod
    def capture_stream(self) -> Stream:
        """Of the current device: the one that captures are made on, unless another is chosen."""

    @abstractmethod
    def record(self, run: Callable[[], T], pool: Any, stream: Any) -> tuple[Graph, T]:
        """Capture what `run` launches on `stream`, mostly `capture_stream`, and give what `run`
        returned: tensors that every replay writes. runner/capture.py, the only caller, has run it
        once before."""

    def kernel_spans(self, run: Callable[[], object]) -> list[KernelSpan]:
        """What ran on the device during `run`, in order. Slows the host down meanwhile. Raises
        SpecEngineError where that cannot be seen."""
        raise SpecEngineError(f"{type(self).__name__} does not tell what its kernels take")


_made: dict[str, Platform] = {}


def platform_of(device: torch.device) -> Platform:
    """The platform of a device, one object a kind."""
    found = _made.get(device.type)
    if found is None:
        found = _made[device.type] = load_place(PLATFORMS[device.type])()
    return found


def best_device() -> torch.device:
    """Of the kinds of core.registry.PLATFORMS the first that is there."""
    kinds = map(torch.device, PLATFORMS)
    return next(one for one in kinds if platform_of(one).is_available())
