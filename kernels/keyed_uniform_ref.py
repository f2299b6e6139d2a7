"""Keyed uniforms in plain PyTorch: 64-bit arithmetic that wraps around, in int64."""

from __future__ import annotations

import torch
from torch import Tensor


def signed(word: int) -> int:
    """The int64 with the same bits as an unsigned 64-bit word."""
    return (word + 2**63) % 2**64 - 2**63


GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB


def keyed_uniform(seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
    hashed = _mix(seeds + signed(GOLDEN * (stream + 1)))
    hashed = _mix(hashed + positions * signed(GOLDEN))
    return _shift_right(hashed, 11).to(torch.float64) * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * signed(MIX_1)
    x = (x ^ _shift_right(x, 27)) * signed(MIX_2)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """int64 >> copies the sign bit; a word's shift does not."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
