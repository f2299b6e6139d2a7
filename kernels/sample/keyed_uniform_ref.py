"""Keyed uniforms on the host: NumPy has the unsigned words that wrap around, PyTorch has not."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB

_Words = np.ndarray[Any, np.dtype[np.uint64]]


def keyed_uniform(seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
    key = _mix(_words(seeds) + np.uint64(GOLDEN * (stream + 1) % 2**64))
    hashed = _mix(key + _words(positions) * np.uint64(GOLDEN))
    uniforms = (hashed >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return torch.from_numpy(uniforms).to(seeds.device)


def _words(x: Tensor) -> _Words:
    return x.cpu().numpy().view(np.uint64)


def _mix(x: _Words) -> _Words:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(MIX_2)
    return x ^ (x >> np.uint64(31))
