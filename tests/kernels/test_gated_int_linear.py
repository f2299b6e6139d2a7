"""silu(gate) * up behind a product with a weight of 4 bits, as one kernel in CUDA C++: its bits are
those of the two kernels, on a GPU or instruction by instruction on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specengine.kernels.linear import int_linear as int_linear_module
from specengine.kernels.linear import int_linear_cuda
from specengine.kernels.linear.activation import act_and_mul
from specengine.kernels.linear.int4_tiles import FewTile, Tile, WideTile
from specengine.kernels.linear.int_linear import gated_int_linear, int_linear
from specengine.kernels.linear.int_linear_cuda import takes_gated
from specengine.kernels.linear.quantised import IntWeight
from tests.halves import slow_but
from tests.kernels.cuda_places import PLACES, placed
from tests.kernels.half_precision import close

HALF = 72  # outputs, of which no block stores a multiple: of 16, 32, 64, 96 or 128
TILES = [
    (FewTile(2, 8, 2, ahead=True), 5, "whole"),
    (FewTile(4, 8, 3, parts=4), 19, "broken"),
    (WideTile(4, 4, 8, 1, 1, 4), 40, "whole"),
    (WideTile(8, 4, 8, 4, 2, 4), 21, "none"),
    (WideTile(12, 4, 8, 8, 8, 4), 9, "whole"),
    (WideTile(16, 8, 8, 2, 2, 3), 70, "whole"),
    (WideTile(8, 4, 8, 1, 1, 4, True), 33, "whole"),
    (WideTile(12, 4, 8, 2, 1, 3, True), 40, "whole"),
]


@pytest.fixture(autouse=True, params=PLACES)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    return placed(request, monkeypatch, int_linear_cuda)


@pytest.fixture(params=[False, True], ids=["warps alone", "warpgroups"])
def warpgroups(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(int_linear_cuda, "has_warpgroups", lambda _: request.param)
    return bool(request.param)


def draw(place: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=place).bfloat16()


def weight_of(place: torch.device, zero: str = "whole", half: int = HALF) -> IntWeight:
    """Gates of some -20 to 20."""
    codes = torch.randint(0, 16, (2 * half, 1536), dtype=torch.uint8, device=place)
    scale = (torch.rand(2 * half, 12, device=place) / 20).half()
    zeros = {
        "none": None,
        "whole": torch.randint(0, 17, scale.shape, dtype=torch.uint8, device=place),
        "broken": torch.randn(scale.shape, device=place) + 8,
    }
    return IntWeight.pack(codes, scale, zeros[zero], 4)


def behind(product: Tensor) -> Tensor:
    """silu(gate) * up of a product, as the separate kernel computes it; the emulator by exp2."""
    if product.is_cuda:
        return act_and_mul(product, "silu", backend="triton")
    gate, up = product.chunk(2, -1)
    wide = gate.float()
    power = torch.exp2(wide * -1.442695041)
    return (wide / (1 + power)).to(product.dtype) * up


@pytest.mark.parametrize(
    ("tile", "rows", "zero", "has_bias"),
    slow_but(
        [(*one, n % 2 > 0) for n, one in enumerate(TILES[:5])],
        [(*one, has_bias) for one in TILES for has_bias in (False, True)],
    ),
    ids=str,
)
def test_every_tile_has_the_bits_of_product_and_activation(
    tile: Tile, rows: int, zero: str, has_bias: bool, place: torch.device
) -> None:
    x, weight = draw(place, rows, 1536), weight_of(place, zero)
    bias = draw(place, 2 * HALF) if has_bias else None
    product = int_linear_cuda.int_linear(x, weight, bias, tile)
    found = int_linear_cuda.int_linear(x, weight, bias, tile, gated=True)
    assert found.shape == (rows, HALF)
    assert torch.equal(found, behind(product))
    close(found, act_and_mul(product, "silu", backend="torch"))


def test_gates_that_are_large_or_no_numbers(place: torch.device) -> None:
    x, weight = draw(place, 4, 1536), weight_of(place)
    x[0] *= 3e3
    x[1] *= -1e30
    x[2, 7] = float("nan")
    x[3, 9] = float("inf")
    for tile in (FewTile(2, 8, 2), WideTile(4, 4, 8, 1, 1, 4)):
        product = int_linear_cuda.int_linear(x, weight, None, tile)
        found = int_linear_cuda.int_linear(x, weight, None, tile, gated=True)
        torch.testing.assert_close(found, behind(product), rtol=0, atol=0, equal_nan=True)


def test_float16_has_the_bits_of_product_and_activation(place: torch.device) -> None:
    if place.type == "cpu":
        pytest.skip("the emulator computes in bfloat16 alone")
    weight = weight_of(place)
    for rows in (1, 12, 40):
        x = draw(place, rows, 1536).half()
        product = int_linear(x, weight, backend="cuda")
        assert torch.equal(gated_int_linear(x, weight, "silu", backend="cuda"), behind(product))


def test_a_row_keeps_its_bits_whatever_stands_beside_it(
    place: torch.device, warpgroups: bool
) -> None:
    x, weight = draw(place, 66, 1536), weight_of(place, half=40)
    whole = gated_int_linear(x, weight, "silu", backend="cuda")
    assert torch.equal(whole, behind(int_linear(x, weight, backend="cuda")))
    for rows in (1, 9, 17, 33):
        assert torch.equal(gated_int_linear(x[:rows], weight, "silu", backend="cuda"), whole[:rows])


def test_columns_in_another_order(place: torch.device) -> None:
    x = draw(place, 2, 1536)
    weight = replace(weight_of(place), order=torch.randperm(1536, device=place))
    expected = behind(int_linear(x, weight, backend="cuda"))
    assert torch.equal(gated_int_linear(x, weight, "silu", backend="cuda"), expected)


@pytest.fixture
def separate(monkeypatch: pytest.MonkeyPatch) -> Callable[..., bool]:
    """Whether a call computes the product by itself."""
    asked: list[Tensor] = []

    def spied(x: Tensor, *given: object, **named: object) -> Tensor:
        asked.append(x)
        return int_linear(x, *given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(int_linear_module, "int_linear", spied)

    def separates(x: Tensor, weight: IntWeight, activation: str, backend: str) -> bool:
        asked.clear()
        found = gated_int_linear(x, weight, activation, backend=backend)  # type: ignore[arg-type]
        product = int_linear(x, weight, backend=backend)  # type: ignore[arg-type]
        close(found, act_and_mul(product, activation, backend="torch"))
        return bool(asked)

    return separates


def test_what_the_kernel_does_not_compute_is_computed_apart(
    separate: Callable[..., bool], place: torch.device
) -> None:
    x, weight = draw(place, 3, 1536), weight_of(place)
    assert not separate(x, weight, "silu", "cuda")
    assert separate(x, weight, "gelu_tanh", "cuda")
    assert separate(x, weight, "relu2", "cuda")
    assert separate(x, weight, "silu", "torch")
    assert gated_int_linear(x[:0], weight, "silu").shape == (0, HALF)
    wide = replace(weight, codes=weight.unpacked(), bits=8)
    assert separate(x, wide, "silu", "auto")


def test_halves_that_begin_amid_16_bytes_are_computed_apart(
    separate: Callable[..., bool], place: torch.device
) -> None:
    x, weight = draw(place, 3, 1536), weight_of(place)
    assert takes_gated(weight)
    fewer = weight.narrow(0, 0, 2 * HALF - 4)  # rows of outputs of no whole 8 bytes
    assert fewer is not None
    assert not takes_gated(fewer)
    assert separate(x, fewer, "silu", "cuda")
    scale = weight.scale[:, :3].contiguous()
    short = replace(weight, codes=weight.codes[:, :192].contiguous(), scale=scale, zero=None)
    assert takes_gated(short)
    assert not takes_gated(replace(short, scale=scale[:136]))  # 408 bytes of gates
    assert not takes_gated(replace(short, zero=scale.byte()))  # 216
    assert separate(x[:, :384], replace(short, zero=scale.byte()), "silu", "cuda")
