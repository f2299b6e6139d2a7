"""Uniform random numbers from a counter: the same key gives the same number, on every device.

The hash is the finaliser of SplitMix64 (Steele, Lea and Flood 2014, section 4), applied once for
the stream and seed and once for the position; a counter-based generator in the sense of Salmon et
al. 2011.
"""

from __future__ import annotations

from torch import Tensor

from specengine.kernels.dispatch import Backend, use_triton
from specengine.kernels.sample import keyed_uniform_ref

LANE = 1 << 32  # position + n * LANE keys the n-th of several draws about one position


def keyed_uniform(
    seeds: Tensor, positions: Tensor, stream: int, *, backend: Backend = "auto"
) -> Tensor:
    """For each row, in 64-bit words that wrap around, and with G = 0x9E3779B97F4A7C15:
    ``u = (mix(mix(seed + G * (stream + 1)) + G * position) >> 11) / 2^53``.

    seeds, positions: int64 [R]; stream: a small number of 0 or more. -> float64 [R] in [0, 1).
    """
    if use_triton(backend, seeds):
        from specengine.kernels.sample import keyed_uniform_triton

        return keyed_uniform_triton.keyed_uniform(seeds, positions, stream)
    return keyed_uniform_ref.keyed_uniform(seeds, positions, stream)
