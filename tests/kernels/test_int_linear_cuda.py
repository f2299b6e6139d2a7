"""Products with weights of 4 bits in CUDA C++, on a GPU or instruction by instruction on a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specengine.kernels.dispatch import MOST_SHARED
from specengine.kernels.linear import int_linear_cuda
from specengine.kernels.linear.int_linear import int_linear
from specengine.kernels.linear.int_linear_cuda import FewTile, ManyTile, takes
from specengine.kernels.linear.quantised import IntWeight
from tests.kernels.cuda_places import PLACES, placed
from tests.kernels.half_precision import close


@pytest.fixture(autouse=True, params=PLACES)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    return placed(request, monkeypatch, int_linear_cuda)


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
    rows: int, group: int, zero: str, scale_type: torch.dtype, place: torch.device
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
        *(ManyTile(2, 4, 8, blocks, 3) for blocks in (1, 2, 4, 8)),
    ],
    ids=str,
)
def test_every_tile_gives_the_same_bits(tile: FewTile | ManyTile, place: torch.device) -> None:
    x, weight = draw(place, 40, 1408), weight_of(place, 140, 1408, 128, "whole")
    expected = int_linear_cuda.int_linear(x, weight, None, FewTile(2, 8, 4))
    assert torch.equal(int_linear_cuda.int_linear(x, weight, None, tile), expected)


def test_weights_share_their_depth_alike_for_all_rows(place: torch.device) -> None:
    """Of layers of an 8B, a 1B and a 135M: the ways decide the order of the sums."""
    for shape in (
        (6144, 4096),
        (4096, 4096),
        (28672, 4096),
        (4096, 14336),
        (2048, 2048),
        (576, 640),
    ):
        weight = IntWeight(torch.empty(shape[0], shape[1] // 2), torch.empty(shape), None, 4, 128)
        found = [int_linear_cuda.tile_for(weight, rows) for rows in (1, 8, 9, 16, 17, 33, 128)]
        ways = {tile.warps if isinstance(tile, FewTile) else tile.ways for tile in found}
        assert ways == {int_linear_cuda.ways_of(*shape)}
        for tile, rows in zip(found, (1, 8, 9, 16, 17, 33, 128), strict=True):
            assert tile.shared_bytes(weight, tile.eights_of(rows)) <= MOST_SHARED


def test_a_row_keeps_its_bits_whatever_stands_beside_it(place: torch.device) -> None:
    x, weight = draw(place, 66, 1152), weight_of(place, 72, 1152, 128, "whole")
    whole = int_linear(x, weight, None, backend="cuda")
    for rows in (1, 9, 33):
        assert torch.equal(int_linear(x[:rows], weight, None, backend="cuda"), whole[:rows])


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
