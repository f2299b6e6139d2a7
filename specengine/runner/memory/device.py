"""Total, used and peak memory of a GPU or a CPU, in bytes."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import torch

_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


class DeviceMemory:
    """Readings of one device. `used` counts every process on a GPU, this process on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"

    def total(self) -> int:
        if self.is_cuda:
            return int(torch.cuda.get_device_properties(self.device).total_memory)
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return min([physical, *_cgroup_limits()])

    def used(self) -> int:
        """In use now, after the allocator has freed its cached blocks."""
        if self.is_cuda:
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info(self.device)
            return int(total - free)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def current(self) -> int:
        """Held by tensors; on a CPU the same as `used`."""
        return torch.cuda.memory_allocated(self.device) if self.is_cuda else self.used()

    def peak(self) -> int:
        """The most held by tensors since `reset_peak`; on CPU since the process began."""
        if self.is_cuda:
            return torch.cuda.max_memory_allocated(self.device)
        return max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, self.used())

    def reset_peak(self) -> None:
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.device)


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
