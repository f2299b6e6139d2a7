"""The host's own processor: nothing is late, and nothing is captured."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor

from specengine.core.machine import cpu_name
from specengine.core.platform import DeviceMemory, Event, Graph, Platform, Stream
from specengine.core.platforms.cpu_region import HostRegion
from specengine.core.region import Region

T = TypeVar("T")

_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


class HostMemory(DeviceMemory):
    def total(self) -> int:
        """What the machine has, or the container may use."""
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return min([physical, *_cgroup_limits()])

    def used(self) -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def current(self) -> int:
        return self.used()

    def peak(self) -> int:
        return max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, self.used())

    def reset_peak(self) -> None: ...


class Passed:
    """An event of a device that is never behind."""

    def __init__(self) -> None:
        self._at = 0.0

    def record(self, stream: Any = None) -> None:
        self._at = perf_counter()

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return float(end._at - self._at) * 1000


class OnlyStream:
    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...


class CpuPlatform(Platform):
    def is_available(self) -> bool:
        return True

    def num_devices(self) -> int:
        return 1

    def device_name(self, device: torch.device) -> str:
        return f"{cpu_name()}, {torch.get_num_threads()} threads"

    def use_device(self, index: int) -> None: ...

    def memory(self, device: torch.device) -> DeviceMemory:
        return HostMemory()

    def free_memory(self) -> int:
        memory = HostMemory()
        return memory.total() - memory.used()

    def new_region(self) -> Region:
        return HostRegion()

    def empty_cache(self) -> None: ...

    def pinned(self, values: Tensor) -> Tensor:
        return values

    def synchronize(self) -> None: ...

    def new_event(self, timing: bool = False) -> Event:
        return Passed()

    def new_stream(self) -> Stream | None:
        return None

    def current_stream(self) -> Stream:
        return OnlyStream()

    def on_stream(self, stream: Any) -> AbstractContextManager[object]:
        return nullcontext()

    def read_on(self, tensor: Tensor, stream: Any) -> None: ...

    def graph_pool(self) -> Any:
        return None

    def capture_stream(self) -> Stream:
        return OnlyStream()

    def record(self, run: Callable[[], T], pool: Any, stream: Any) -> tuple[Graph, T]:
        raise NotImplementedError("a CPU has no graphs")


def _cgroup_limits() -> list[int]:
    limits = []
    for path in _CGROUP_LIMITS:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            limits.append(int(text))
    return limits
