"""Products with weights of 4 bits in CUDA C++, on a GPU or instruction by instruction on a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specengine.kernels.dispatch import MOST_SHARED
from specengine.kernels.linear import int_linear_cuda
from specengine.kernels.linear.int4_tiles import (
    FewTile,
    Tile,
    WideTile,
    parts_of,
    ways_of,
    wide_tile,
)
from specengine.kernels.linear.int4_turn_tiles import TurnTile
from specengine.kernels.linear.int_linear import int_linear
from specengine.kernels.linear.int_linear_cuda import is_faster, takes, takes_wide, tile_for
from specengine.kernels.linear.quantised import IntWeight
from tests.halves import slow_but, thinned
from tests.kernels.cuda_places import PLACES, placed
from tests.kernels.half_precision import close


@pytest.fixture(autouse=True, params=PLACES)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    return placed(request, monkeypatch, int_linear_cuda)


@pytest.fixture(params=[False, True], ids=["warps alone", "warpgroups"])
def warpgroups(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(int_linear_cuda, "has_warpgroups", lambda _: request.param)
    return bool(request.param)


def draw(place: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=place).bfloat16()


def weight_of(
    place: torch.device,
    outs: int,
    columns: int,
    group: int,
    zero: str = "none",
    scale_type: torch.dtype = torch.float16,
) -> IntWeight:
    codes = torch.randint(0, 16, (outs, columns), dtype=torch.uint8, device=place)
    scale = (torch.rand(outs, columns // group, device=place) / 20).to(scale_type)
    zeros = {
        "none": None,
        "whole": torch.randint(0, 17, scale.shape, dtype=torch.uint8, device=place),
        "broken": torch.randn(scale.shape, device=place) + 8,
    }
    return IntWeight.pack(codes, scale, zeros[zero], 4)


def compare(x: Tensor, weight: IntWeight, bias: Tensor | None = None) -> None:
    found = int_linear(x, weight, bias, backend="cuda")
    assert found.dtype == x.dtype
    close(found, int_linear(x, weight, bias, backend="torch"))


@pytest.mark.parametrize(
    ("rows", "group", "zero", "scale_type"),
    [
        (1, 128, "whole", torch.float16),
        (3, 32, "broken", torch.float32),
        (9, 64, "none", torch.bfloat16),
        (18, 96, "whole", torch.float16),
    ],
)
def test_few_rows_equal_the_reference(
    rows: int, group: int, zero: str, scale_type: torch.dtype, place: torch.device
) -> None:
    """Outputs that no block divides, and depths, but that of 128, that no stage does."""
    columns = 1152 if group == 128 else 1056 + 96 * (group == 64)
    weight = weight_of(place, 72, columns, group, zero, scale_type)
    compare(draw(place, rows, columns), weight, draw(place, 72) if rows != 3 else None)


@pytest.mark.parametrize(
    ("rows", "group", "zero", "scale_type"),
    [(20, 128, "whole", torch.float16), (70, 256, "none", torch.float32)],
)
def test_dozens_of_rows_equal_the_reference(
    rows: int,
    group: int,
    zero: str,
    scale_type: torch.dtype,
    place: torch.device,
    warpgroups: bool,
) -> None:
    weight = weight_of(place, 136, 1280, group, zero, scale_type)
    compare(draw(place, rows, 1280), weight, draw(place, 136))


def test_float16_equals_the_reference(place: torch.device) -> None:
    if place.type == "cpu":
        pytest.skip("the emulator computes in bfloat16 alone")
    for rows in (1, 12, 40):
        for group, zero in ((128, "whole"), (32, "broken")):
            x = draw(place, rows, 1152).half()
            compare(x, weight_of(place, 72, 1152, group, zero), draw(place, 72).half())


def test_columns_in_another_order_equal_the_reference(place: torch.device) -> None:
    weight = weight_of(place, 40, 256, 128, "whole")
    compare(draw(place, 2, 256), replace(weight, order=torch.randperm(256, device=place)))


@pytest.mark.parametrize(
    "tile",
    [
        FewTile(1, 8, 2),
        FewTile(4, 8, 3),
        FewTile(2, 8, 2, ahead=True),
        WideTile(4, 4, 8, 1, 1, 4),
        WideTile(16, 8, 8, 1, 1, 3),
    ],
    ids=str,
)
def test_every_tile_gives_the_same_bits(tile: Tile, place: torch.device) -> None:
    x, weight = draw(place, 40, 1408), weight_of(place, 140, 1408, 128, "whole")
    expected = int_linear_cuda.int_linear(x, weight, None, FewTile(2, 8, 4))
    assert torch.equal(int_linear_cuda.int_linear(x, weight, None, tile), expected)


CLUSTERS = [
    (WideTile(4, 8, 8, 4, 2, 8), 70),
    (WideTile(8, 4, 8, 4, 4, 3), 5),
    (WideTile(4, 4, 8, 2, 1, 4), 9),
    (WideTile(8, 4, 8, 8, 4, 4), 33),
    (WideTile(12, 4, 8, 8, 8, 5), 21),
]


@pytest.mark.parametrize(("tile", "rows"), slow_but(CLUSTERS[:2], CLUSTERS), ids=str)
def test_blocks_of_a_cluster_have_the_bits_of_parts_of_warps(
    tile: WideTile, rows: int, place: torch.device
) -> None:
    x, weight = draw(place, rows, 1408), weight_of(place, 140, 1408, 128, "whole")
    bias = draw(place, 140)
    expected = int_linear_cuda.int_linear(x, weight, bias, FewTile(2, 8, 4, parts=tile.parts))
    close(expected, int_linear(x, weight, bias, backend="torch"))
    assert torch.equal(int_linear_cuda.int_linear(x, weight, bias, tile), expected)
    assert weight.zero is not None  # stages of two ways are large and cancel: the order shows
    for of_stages, width in ((weight.codes, 64), (weight.scale, 1), (weight.zero, 1)):
        of_stages[:, 4 * width : 5 * width] = of_stages[:, :width]
    x[:, :128] *= 1 << 15
    x[:, 512:640] = -x[:, :128]
    expected = int_linear_cuda.int_linear(x, weight, bias, FewTile(2, 8, 4, parts=tile.parts))
    assert torch.equal(int_linear_cuda.int_linear(x, weight, bias, tile), expected)
    others = FewTile(2, 8, 4, parts=1 if tile.parts > 1 else 2)
    assert not torch.equal(int_linear_cuda.int_linear(x, weight, bias, others), expected)


@pytest.mark.parametrize(
    ("tile", "scale_type"),
    thinned(
        2,
        [WideTile(4, 16, 8, 1, 1, 3, True), WideTile(8, 4, 8, 4, 2, 4, True)],
        [torch.float16, torch.bfloat16],
    ),
)
def test_rounded_weights_are_the_dequantised_ones(
    tile: WideTile, scale_type: torch.dtype, place: torch.device
) -> None:
    """Each bit: rows of x that choose a column each show the weight."""
    weight = weight_of(place, 140, 1152, 128, "whole", scale_type)
    columns = torch.randperm(1152, device=place)[:70]
    x = torch.zeros(70, 1152, device=place).bfloat16()
    x[torch.arange(70, device=place), columns] = 1
    expected = weight.dequantised().bfloat16()[:, columns].T
    assert torch.equal(int_linear_cuda.int_linear(x, weight, None, tile), expected)
    x = draw(place, 70, 1152)
    whole = x.float() @ weight.dequantised().bfloat16().float().T
    close(int_linear_cuda.int_linear(x, weight, None, tile), whole.bfloat16())


def empty_weight(outs: int, columns: int) -> IntWeight:
    scale = torch.empty(outs, columns // 128, dtype=torch.float16)
    codes = torch.empty(outs, columns // 2, dtype=torch.uint8)
    return IntWeight(codes, scale, None, 4, 128)


@pytest.mark.parametrize(
    "shape",
    [
        *((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),  # an 8B
        *((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)),  # a 1B
        *((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),  # a 70B
        *((14336, 8192), (8192, 7168)),  # what one of four ranks has of it
        (576, 640),
    ],
    ids=str,
)
def test_order_of_a_sum_depends_on_the_weight_alone(
    shape: tuple[int, int], place: torch.device, warpgroups: bool
) -> None:
    weight = empty_weight(*shape)
    few = 16 if shape == (4096, 14336) else 8
    if shape in ((10240, 8192), (57344, 8192), (14336, 8192)):
        few = 0
    for rows in (1, 6, 7, 8, 9, 16, 17, 32, 33, 64, 65, 128):
        tile = tile_for(torch.empty(rows, 1).bfloat16(), weight)
        assert tile.shared_bytes(weight, tile.eights_of(rows)) <= MOST_SHARED
        if isinstance(tile, FewTile):
            found = tile.warps, tile.parts
        elif isinstance(tile, TurnTile):
            found = tile.ways, tile.parts
        else:
            assert not tile.rounded
            found = tile.ways, tile.parts
            assert tile.parts // tile.blocks in (1, 2)
        assert found == (ways_of(*shape), parts_of(*shape))
        is_wide = warpgroups and rows > few and shape != (576, 640)
        assert isinstance(tile, WideTile) == is_wide


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (
            (6144, 4096),
            {32: (16, 8, 4, 4), 64: (16, 8, 4, 4), 128: (12, 8, 2, 4)},
        ),
        (
            (4096, 4096),
            {24: (12, 8, 4, 4), 32: (12, 8, 4, 4), 64: (4, 8, 2, 8), 128: (8, 8, 2, 4)},
        ),
        (
            (28672, 4096),
            {32: (16, 8, 1, 4), 64: (16, 8, 1, 4), 128: (8, 16, 1, 3), 256: (8, 16, 1, 4)},
        ),
        (
            (4096, 14336),
            {24: (4, 8, 2, 8), 32: (4, 8, 2, 8), 64: (4, 8, 2, 8), 128: (8, 8, 2, 4)},
        ),
        ((8192, 7168), {16: (4, 8, 2, 8), 32: (4, 8, 2, 8)}),  # of a 70B: not measured
    ],
    ids=str,
)
def test_layers_take_the_tiles_that_were_chosen(
    shape: tuple[int, int], expected: dict[int, tuple[int, ...]], place: torch.device
) -> None:
    weight = empty_weight(*shape)
    tiles = {rows: wide_tile(weight, rows) for rows in expected}
    found = {n: (one.warps, one.most_eights, one.blocks, one.slots) for n, one in tiles.items()}
    assert found == expected


def test_more_than_128_rows_take_rounded_weights_where_they_are_many(
    place: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int_linear_cuda, "has_warpgroups", lambda _: True)
    many, few = empty_weight(28672, 4096), empty_weight(6144, 4096)
    x = torch.empty(256, 1).bfloat16()
    for weight in (many, empty_weight(4096, 14336)):
        tile = tile_for(x, weight)
        assert isinstance(tile, WideTile)
        assert tile.rounded
        assert tile.shared_bytes(weight, tile.eights_of(256)) <= MOST_SHARED
    assert is_faster(x, many)
    assert not is_faster(torch.empty(257, 1).bfloat16(), many)
    assert is_faster(x[:128], few)
    assert not is_faster(x[:129], few)
    assert not is_faster(x, replace(many, scale=many.scale.float()))
    assert not is_faster(x.half(), replace(many, scale=many.scale.bfloat16()))


def test_a_row_keeps_its_bits_whatever_stands_beside_it(
    place: torch.device, warpgroups: bool
) -> None:
    x, weight = draw(place, 66, 1152), weight_of(place, 72, 1152, 128, "whole")
    whole = int_linear(x, weight, None, backend="cuda")
    for rows in (1, 9, 16, 17, 33):
        assert torch.equal(int_linear(x[:rows], weight, None, backend="cuda"), whole[:rows])


def test_what_the_kernel_for_dozens_does_not_compute_is_refused(
    place: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int_linear_cuda, "has_warpgroups", lambda _: True)
    x, weight = torch.empty(17, 2048).bfloat16(), empty_weight(4096, 2048)
    assert takes_wide(x, weight)
    scales = weight.scale
    refused = [
        replace(weight, group=64, scale=scales.repeat(1, 2)),
        replace(weight, group=192),
        replace(weight, zero=scales.float()),
        replace(weight, codes=weight.codes[:4095], scale=scales[:4095]),
        empty_weight(4096, 7 * 128),
    ]
    for one in refused:
        assert not takes_wide(x, one)
        assert is_faster(x[:16], one)
        assert not is_faster(x, one)
        assert isinstance(tile_for(x, one), FewTile)
    monkeypatch.setattr(int_linear_cuda, "has_warpgroups", lambda _: False)
    assert not takes_wide(x, weight)
    assert not is_faster(x, weight)


def test_what_the_kernels_do_not_compute_is_refused(place: torch.device) -> None:
    x, weight = draw(place, 2, 256), weight_of(place, 64, 256, 128, "whole")
    assert takes(x, weight)
    assert not takes(x.float(), weight)
    assert not takes(x, replace(weight, bits=8))
    assert not takes(x, replace(weight, group=16))
    assert not takes(x, replace(weight, scale=weight.scale.double()))
    assert weight.zero is not None
    assert not takes(x, replace(weight, zero=weight.zero.int()))
    assert not takes(draw(place, 2, 257)[:, 1:], weight)
    deep = 1 << 17  # whose scales fill no shared memory
    many = IntWeight(weight.codes.new_empty(64, deep // 2), weight.scale, None, 4, 32)
    assert not takes(x, many)
