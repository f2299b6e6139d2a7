"""The kernel for up to 8 rows with 4-bit weights and groups of 128, on a GPU or on a CPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from specengine.kernels.dispatch import MOST_SHARED
from specengine.kernels.linear import int_linear_cuda
from specengine.kernels.linear.int4_tiles import FewTile, parts_of, ways_of
from specengine.kernels.linear.int4_turn_tiles import TurnTile, turn_tile
from specengine.kernels.linear.int_linear import int_linear
from specengine.kernels.linear.int_linear_cuda import tile_for
from tests.halves import each_value, slow_but
from tests.kernels.cuda_places import PLACES, placed
from tests.kernels.half_precision import close
from tests.kernels.test_int_linear_cuda import draw, empty_weight, weight_of


@pytest.fixture(autouse=True, params=PLACES)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    return placed(request, monkeypatch, int_linear_cuda)


# Outputs, columns, and the tile but for its rows: as many outputs as blocks have, and others, whose
# last blocks overlap; rings shorter than the depth and as long; sums beside the ring and in it.
TILES = [
    (112, 2048, TurnTile(8, 16, 2, side=2, mine=2, line=1, slots=2)),
    (80, 2048, TurnTile(8, 8, 1, side=1, mine=4, line=2, slots=2, early=2)),
    (112, 4096, TurnTile(8, 8, 4, side=3, mine=1, line=1, slots=3, early=2)),
    (128, 4096, TurnTile(8, 16, 4, side=2, mine=4, line=4, slots=2, early=1)),
    (64, 4096, TurnTile(8, 8, 1, side=2, mine=2, line=2, slots=3)),
    (64, 4096, TurnTile(8, 8, 8, side=2, mine=8, line=4, slots=2, early=2)),
]


@pytest.mark.parametrize(
    ("outs", "columns", "tile", "rows", "scale_type", "zero"),
    each_value(
        1,
        TILES,
        [1, 2, 3, 8],
        [(torch.float16, "whole"), (torch.bfloat16, "none"), (torch.float32, "whole")],
    ),
    ids=str,
)
def test_bits_are_those_of_the_kernel_for_few_rows(
    outs: int,
    columns: int,
    tile: TurnTile,
    rows: int,
    scale_type: torch.dtype,
    zero: str,
    place: torch.device,
) -> None:
    tile = replace(tile, rows=next(n for n in (1, 2, 4, 8) if n >= rows))
    weight = weight_of(place, outs, columns, 128, zero, scale_type)
    x, bias = draw(place, rows, columns), draw(place, outs)
    few = FewTile(2, tile.ways, 2, parts=tile.parts)
    expected = int_linear_cuda.int_linear(x, weight, bias, few)
    close(expected, int_linear(x, weight, bias, backend="torch"))
    assert torch.equal(int_linear_cuda.int_linear(x, weight, bias, tile), expected)
    expected = int_linear_cuda.int_linear(x, weight, bias, few, gated=True)
    assert torch.equal(int_linear_cuda.int_linear(x, weight, bias, tile, gated=True), expected)


@pytest.mark.parametrize(("outs", "columns", "tile"), slow_but(TILES[1:3], TILES[:4]), ids=str)
def test_sums_of_ways_are_added_in_order(
    outs: int, columns: int, tile: TurnTile, place: torch.device
) -> None:
    """Stages of two ways are large and cancel: the order shows."""
    weight, x = weight_of(place, outs, columns, 128, "whole"), draw(place, 8, columns)
    assert weight.zero is not None
    for of_stages, width in ((weight.codes, 64), (weight.scale, 1), (weight.zero, 1)):
        of_stages[:, 4 * width : 5 * width] = of_stages[:, :width]
    x[:, :128] *= 1 << 15
    x[:, 512:640] = -x[:, :128]
    few = FewTile(2, tile.ways, 2, parts=tile.parts)
    expected = int_linear_cuda.int_linear(x, weight, None, few)
    assert torch.equal(int_linear_cuda.int_linear(x, weight, None, tile), expected)
    other = replace(few, parts=8 if few.parts < 8 else 1)
    assert not torch.equal(int_linear_cuda.int_linear(x, weight, None, other), expected)


@pytest.mark.parametrize(
    ("shape", "most"),
    [
        *(((6144, 4096), 8), ((4096, 4096), 8), ((28672, 4096), 8), ((4096, 14336), 2)),  # an 8B
        *(((3072, 2048), 8), ((2048, 2048), 8), ((16384, 2048), 8), ((2048, 8192), 4)),  # a 1B
        *(((10240, 8192), 0), ((8192, 8192), 4), ((57344, 8192), 0), ((8192, 28672), 1)),  # a 70B
        ((16, 2048), 8),
    ],
    ids=str,
)
def test_a_block_fits_and_has_the_order_of_sums_of_the_weight(
    shape: tuple[int, int], most: int, place: torch.device
) -> None:
    """most: rows up to which x is small enough to stand in shared memory."""
    for rows, scale_type in product((1, 2, 3, 8), (torch.float16, torch.float32)):
        weight = empty_weight(*shape)
        weight = replace(weight, scale=weight.scale.to(scale_type), zero=weight.scale.byte())
        tile = turn_tile(weight, rows)
        assert (tile is not None) == (rows <= most)
        if tile is None:
            continue
        assert tile.rows >= rows
        assert (tile.ways, tile.parts) == (ways_of(*shape), parts_of(*shape))
        assert tile.outs <= shape[0]
        assert tile.threads <= 1024
        assert tile.shared_bytes(weight, 1) <= MOST_SHARED
        assert tile_for(torch.empty(rows, 1).bfloat16(), weight) == tile


def test_what_the_kernel_does_not_compute_is_refused(place: torch.device) -> None:
    weight = empty_weight(64, 2048)
    assert turn_tile(weight, 8) is not None
    assert turn_tile(weight, 9) is None
    assert turn_tile(replace(weight, group=64), 1) is None
    assert turn_tile(replace(weight, zero=weight.scale.float()), 1) is None
    assert turn_tile(empty_weight(72, 2048), 1) is None
    assert turn_tile(empty_weight(64, 1920), 1) is None
