"""From the host to a device, without waiting for it.

A copy from pageable memory may wait until the device has done all that was launched before.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pinned(values: Tensor, device: torch.device) -> Tensor:
    """values, contiguous, where the device can read them by itself: in a copy, so that values may
    change after this call. Where the device is the host, values itself if it is contiguous.
    values: on the host, in pageable memory."""
    values = values.contiguous()  # pinning keeps strides, and refuses an expanded tensor
    return values.pin_memory() if device.type == "cuda" else values


def sent(values: Tensor, device: torch.device) -> Tensor:
    """values on the device, in the order of its current stream; values itself where it lies there
    already."""
    if values.device.type == "cpu":
        values = pinned(values, device)
    return values.to(device, non_blocking=True)
