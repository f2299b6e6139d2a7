"""Streams of a CUDA device.

PyTorch has 32 of each priority and gives them out in turn, so that a new one may be in use. For
most that is harmless: what two parts of the process give to one stream runs in turn. But kernels
keep counters for each stream and cuBLAS a workspace, and graphs hold those of the streams that they
were captured on, wherever they are replayed. So those streams are given to nothing else.
"""

from __future__ import annotations

from threading import Lock
from typing import Any, NamedTuple

import torch

from specengine.core.platform import Stream


class CaptureStreams(NamedTuple):
    # One for all captures: cuBLAS's workspaces of a stream for each took a GiB.
    main: Stream
    beside: Stream  # for the second branch of a graph (layers.side_stream)


_made: dict[int, CaptureStreams] = {}
_lock = Lock()


def capture_streams(device: int) -> CaptureStreams:
    """Two that `new_stream` never gives; the same at each call."""
    with _lock:
        if device not in _made:
            _made[device] = CaptureStreams(_draw(device), _draw(device))
        return _made[device]


def new_stream(device: int) -> Stream:
    kept = {_handle(one) for one in capture_streams(device)}
    drawn = _draw(device)
    while _handle(drawn) in kept:
        drawn = _draw(device)
    return drawn


def _draw(device: int) -> Stream:
    stream: Any = torch.cuda.Stream
    made: Stream = stream(device)
    return made


def _handle(stream: Any) -> int:
    return int(stream.cuda_stream)
