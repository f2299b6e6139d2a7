"""From the host to a device, without waiting for it.

A copy from pageable memory may wait until the device has done all that was launched before.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pinned(values: Tensor, device: torch.device) -> Tensor:
    """A copy that the device can read by itself; the same tensor where it need not. values: on the
    host, and free to change after this call."""
    return values.pin_memory() if device.type == "cuda" else values


def sent(values: Tensor, device: torch.device) -> Tensor:
    """values on the device, in the order of its current stream. Those that lie on a device already
    are moved as they are."""
    if values.device.type == "cpu":
        values = pinned(values, device)
    return values.to(device, non_blocking=True)
