"""Streams that own a part of a GPU's multiprocessors (SMs): green contexts, through cuda-bindings.

A kernel in such a stream runs on its SMs alone, as does one of a graph that was captured there.
Kernels of all other streams may run on every SM.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

logger = logging.getLogger(__name__)


class NoGreenContexts(Exception):
    """Why there are none: the reason that is counted."""


@dataclass(frozen=True)
class SmStream:
    """num_sms: of the stream. context: kept, for the stream lives as long as it does."""

    stream: torch.cuda.Stream
    num_sms: int
    context: Any


@dataclass(frozen=True)
class SmParts:
    """A device in two: the share, and all other SMs."""

    share: SmStream
    rest: SmStream


def make_sm_parts(device: torch.device, shares: Sequence[float]) -> list[SmParts]:
    """One a share of the device's SMs, each rounded to what the device can part (8 SMs on Hopper).
    Parts of different shares overlap.

    Raises NoGreenContexts where package, driver or device have none.
    """
    if device.type != "cuda":
        raise NoGreenContexts(f"a device of the kind {device.type} does not part its SMs")
    driver = _driver()
    torch.cuda.current_stream(device).synchronize()  # the primary context is current
    index = torch.cuda.current_device() if device.index is None else device.index
    handle = _call(driver.cuDeviceGet, index)
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    every = _call(driver.cuDeviceGetDevResource, handle, kind)
    total = int(every.sm.smCount)
    return [_parts(driver, handle, every, max(1, round(share * total))) for share in shares]


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise NoGreenContexts("cuda-bindings is not installed") from error
    if not hasattr(driver, "cuGreenCtxStreamCreate"):
        raise NoGreenContexts("cuda-bindings knows no green contexts")
    return driver


def _parts(driver: Any, device: Any, every: Any, wanted: int) -> SmParts:
    """The driver promises clusters to the group that it makes, and not to the remainder: rounds
    have kernels of large clusters."""
    count = max(1, int(every.sm.smCount) - wanted)
    groups, made, rest = _calls(driver.cuDevSmResourceSplitByCount, 1, every, 0, count)
    if not made or not rest.sm.smCount:
        raise NoGreenContexts("the device does not part its SMs")
    return SmParts(share=_stream(driver, device, rest), rest=_stream(driver, device, groups[0]))


def _stream(driver: Any, device: Any, part: Any) -> SmStream:
    described = _call(driver.cuDevResourceGenerateDesc, [part], 1)
    flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    context = _call(driver.cuGreenCtxCreate, described, device, int(flags))
    non_blocking = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
    stream = _call(driver.cuGreenCtxStreamCreate, context, int(non_blocking), 0)  # priority 0
    own = torch.cuda.ExternalStream(int(stream))  # type: ignore[no-untyped-call]
    return SmStream(own, int(part.sm.smCount), context)


def _call(function: Any, *given: Any) -> Any:
    return _calls(function, *given)[0]


def _calls(function: Any, *given: Any) -> tuple[Any, ...]:
    """What a function of the driver gives, behind its status."""
    try:
        status, *found = function(*given)
    except RuntimeError as error:  # the installed driver lacks the function
        raise NoGreenContexts("the driver knows no green contexts") from error
    if int(status) != 0:
        raise NoGreenContexts(f"the driver has no green contexts here ({status.name})")
    return tuple(found)
