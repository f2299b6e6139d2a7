"""Between the host and a device, without waiting for more than what is asked for.

A copy from pageable memory may wait until the device has done all that was launched before.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specengine.core.platform import Event, platform_of

Tokens = list[int] | NDArray[np.int64]


def int64(values: Tokens) -> Tensor:
    """int64 [len(values)]. Of thousands torch.tensor takes three times as long."""
    return torch.from_numpy(np.array(values, dtype=np.int64))


def pinned(values: Tensor, device: torch.device) -> Tensor:
    """values, contiguous, where the device can read them by itself: in a copy, so that values may
    change after this call. Where the device is the host, values itself if it is contiguous.
    values: on the host, in pageable memory."""
    values = values.contiguous()  # pinning keeps strides, and refuses an expanded tensor
    return platform_of(device).pinned(values)


def sent(values: Tensor, device: torch.device) -> Tensor:
    """values on the device, in the order of its current stream; values itself where it lies there
    already."""
    if values.device.type == "cpu":
        values = pinned(values, device)
    return values.to(device, non_blocking=True)


class Arriving:
    """values, on their way to the host: launched behind all that the device was given so far, and
    not waited for before they are read."""

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self._landed: Event | None = None
        platform = platform_of(values.device)
        if platform.is_accelerator:
            self._values = platform.pinned(torch.empty(values.shape, dtype=values.dtype))
            self._values.copy_(values, non_blocking=True)
            self._landed = platform.new_event()
            self._landed.record()

    def read(self) -> Tensor:
        if self._landed is not None:
            self._landed.synchronize()
        return self._values
