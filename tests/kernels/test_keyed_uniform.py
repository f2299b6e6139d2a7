from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from specengine.kernels.sample.keyed_uniform import keyed_uniform
from tests.support.chi_squared import chisquare

WORD = 2**64
GOLDEN = 0x9E3779B97F4A7C15


def mix(x: int) -> int:
    """The finaliser of SplitMix64, on Python's integers."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB % WORD
    return x ^ x >> 31


def plain(seed: int, position: int, stream: int) -> float:
    key = mix((seed + GOLDEN * (stream + 1)) % WORD)
    return float(mix((key + GOLDEN * position) % WORD) >> 11) / 2.0**53


def keys() -> tuple[Tensor, Tensor]:
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 12345, 12345])
    return seeds, torch.tensor([0, 1, 2, 3, 2**40, 7, 8])


def test_equals_the_integers_of_python() -> None:
    seeds, positions = keys()
    for stream in range(4):
        expected = [
            plain(s, p, stream) for s, p in zip(seeds.tolist(), positions.tolist(), strict=True)
        ]
        assert keyed_uniform(seeds, positions, stream).tolist() == expected


def test_triton_equals_reference(device: torch.device) -> None:
    seeds, positions = (x.repeat(50) for x in keys())
    expected = keyed_uniform(seeds, positions, 2)
    got = keyed_uniform(seeds.to(device), positions.to(device), 2, backend="triton")
    assert got.dtype == torch.float64
    assert torch.equal(got.cpu(), expected)


def test_views_are_read_as_what_they_show(device: torch.device) -> None:
    """A batch of one expands its seed over its nodes, and flattening that copies nothing."""
    seeds = torch.tensor([3, 4, 5, 6], device=device)[:1].expand(1, 4).reshape(-1)
    positions = torch.arange(8, device=device)[::2]
    assert not seeds.is_contiguous()
    expected = keyed_uniform(seeds.cpu(), positions.cpu(), 2)
    assert torch.equal(keyed_uniform(seeds, positions, 2, backend="triton").cpu(), expected)


def test_zero_rows(device: torch.device) -> None:
    empty = torch.empty(0, dtype=torch.int64, device=device)
    assert keyed_uniform(empty, empty, 0, backend="triton").shape == (0,)


def kolmogorov(draws: ArrayLike) -> float:
    """How far the distribution of draws is from the uniform one in [0, 1): the largest difference,
    in units of 1 / sqrt(number of draws)."""
    above = np.sort(draws)
    share = np.arange(len(above) + 1) / len(above)
    return float(max((share[1:] - above).max(), (above - share[:-1]).max()) * len(above) ** 0.5)


def test_the_distance_from_uniform_draws_is_the_largest() -> None:
    assert kolmogorov([0.5, 0.125, 0.25, 0.375]) == 1.0  # all are there at 0.5
    assert kolmogorov([0.75, 0.5]) == pytest.approx(0.5 * 2**0.5)  # none is there below 0.5


def test_neighbouring_keys_are_uniform_and_independent() -> None:
    """Small seeds and consecutive positions are what requests really have."""
    seeds, positions = torch.arange(300).repeat_interleave(100), torch.arange(100).repeat(300)
    draws = [keyed_uniform(seeds, positions, stream).numpy() for stream in range(4)]
    for draw in draws:
        assert kolmogorov(draw) < 1.95  # larger by chance in one case of 1,000
    by_seed = draws[0].reshape(300, 100)
    pairs = {
        "positions": (by_seed[:, :-1], by_seed[:, 1:]),
        "seeds": (by_seed[:-1], by_seed[1:]),
        "streams": (draws[0], draws[3]),
    }
    for name, (one, other) in pairs.items():
        cells = torch.from_numpy((one * 8).astype(int) * 8 + (other * 8).astype(int))
        counts = torch.bincount(cells.flatten(), minlength=64).numpy()
        assert chisquare(counts).pvalue > 1e-3, name
