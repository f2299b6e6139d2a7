"""Experts in MXFP4 in CUDA C++, on a GPU or instruction by instruction on a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specengine.kernels.experts import experts_ref, mxfp4_cuda, mxfp4_row_cuda
from specengine.kernels.experts.experts import experts, room_for_parts
from specengine.kernels.experts.formats.mxfp4 import FORMAT
from specengine.kernels.experts.mxfp4_cuda import Tile, computes, takes, tile_for
from specengine.kernels.experts.mxfp4_product import Product
from specengine.kernels.experts.mxfp4_row_cuda import RowTile
from specengine.kernels.experts.packed import PackedExperts, PackedExpertWeights
from specengine.kernels.experts.types import Activation, Chosen
from specengine.kernels.linear.mxfp4 import Mxfp4Weight
from specengine.kernels.linear.quantised import Fp8Input
from tests.halves import slow_but
from tests.kernels.cuda_places import PLACES, placed
from tests.kernels.half_precision import close

EXPERTS, CHOSEN = 5, 2
HIDDEN, INNER = 320, 192


def run_on(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (mxfp4_cuda, mxfp4_row_cuda):
        monkeypatch.setattr(module, "multiprocessors", lambda _: blocks)


@pytest.fixture(autouse=True, params=PLACES)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if request.param == "cpu":
        run_on(7, monkeypatch)
    return placed(request, monkeypatch, mxfp4_cuda)


def stack(place: torch.device, rows: int, columns: int) -> PackedExperts:
    def one() -> Mxfp4Weight:
        codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device=place)
        scale = torch.randint(119, 123, (rows, columns // 32), dtype=torch.uint8, device=place)
        return Mxfp4Weight(codes, scale)

    made = PackedExperts.of(FORMAT, EXPERTS, (one() for _ in range(EXPERTS)))
    assert made is not None
    return made


def drawn(place: torch.device, rows: int) -> tuple[Tensor, Chosen]:
    x = torch.randn(rows, HIDDEN, device=place).bfloat16()
    order = torch.rand(rows, EXPERTS, device=place).argsort(1)[:, :CHOSEN]
    return x, Chosen(order.int().contiguous(), torch.rand(rows, CHOSEN, device=place))


def made(place: torch.device, name: str, has_bias: bool) -> PackedExpertWeights:
    biases: list[Tensor | None] = [None, None]
    if has_bias:
        biases = [
            torch.randn(EXPERTS, width, device=place).bfloat16() for width in (2 * INNER, HIDDEN)
        ]
    both = stack(place, 2 * INNER, HIDDEN), stack(place, HIDDEN, INNER)
    return PackedExpertWeights(*both, *biases, activation=Activation(name))


def first(x: Tensor, chosen: Chosen, rows: int) -> tuple[Tensor, Chosen]:
    ids, weights = (one[:rows].contiguous() for one in (chosen.ids_TK, chosen.weights_TK))
    return x[:rows], Chosen(ids, weights)


CASES = [
    (1, "silu", True, Tile(2, 2, 4)),
    (3, "clamped", True, Tile(3, 4, 1)),
    (9, "silu", False, Tile(3, 2, 1)),
    (40, "clamped", True, Tile(2, 9, 2)),
]


@pytest.mark.parametrize(("rows", "name", "has_bias", "tile"), slow_but(CASES[1:], CASES))
def test_experts_equal_the_reference(
    rows: int,
    name: str,
    has_bias: bool,
    tile: Tile,
    place: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Outputs that no block divides, depths that no chunk does, and more rows than a block."""
    run_on(2 * EXPERTS, monkeypatch)
    x, chosen = drawn(place, rows)
    weights = made(place, name, has_bias)
    found = mxfp4_cuda.experts(x, chosen, weights, tile)
    close(found.sum(0).bfloat16(), experts_ref.experts(x, chosen, weights))
    assert torch.equal(mxfp4_cuda.experts(*first(x, chosen, 1), weights, tile)[:, 0], found[:, 0])


def test_parts_fill_the_room_that_is_made_for_them(place: torch.device) -> None:
    (x, chosen), weights = drawn(place, 2), made(place, "silu", True)
    expected = mxfp4_cuda.experts(x, chosen, weights)
    room = torch.full((len(expected) + 1, *x.shape), torch.nan, device=place)
    found = mxfp4_cuda.experts(x, chosen, weights, into=room)
    assert found.data_ptr() == room.data_ptr()
    assert torch.equal(found, expected)
    assert room[-1].isnan().all()


def test_columns_of_one_chunk_equal_the_reference(
    place: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have no second half."""
    monkeypatch.setitem(globals(), "INNER", 64)
    (x, chosen), weights = drawn(place, 2), made(place, "silu", True)
    found = mxfp4_cuda.experts(x, chosen, weights)
    close(found.sum(0).bfloat16(), experts_ref.experts(x, chosen, weights))


def test_experts_that_no_row_chose_are_passed_over(
    place: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row among those of its expert has the bits that it has alone, in whatever tile."""
    x = torch.randn(12, HIDDEN, device=place).bfloat16()
    ids = torch.tensor([[3, 1]], dtype=torch.int32, device=place).repeat(12, 1)
    chosen, weights = (
        Chosen(ids, torch.rand(12, CHOSEN, device=place)),
        made(place, "clamped", True),
    )
    run_on(2 * EXPERTS, monkeypatch)
    found = mxfp4_cuda.experts(x, chosen, weights, Tile(2, 9, 2))
    close(found.sum(0).bfloat16(), experts_ref.experts(x, chosen, weights))
    run_on(3 * EXPERTS, monkeypatch)
    alone = mxfp4_cuda.experts(*first(x, chosen, 1), weights, Tile(3, 2, 1))
    assert torch.equal(alone[:, 0], found[:, 0])


def test_choices_of_no_expert_are_passed_over(
    place: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_on(3, monkeypatch)
    (x, chosen), weights = drawn(place, 3), made(place, "clamped", True)
    alone = mxfp4_cuda.experts(*first(x, chosen, 1), weights, Tile(3, 2, 1))
    chosen.ids_TK[1], chosen.ids_TK[2] = -1, EXPERTS
    found = mxfp4_cuda.experts(x, chosen, weights, Tile(3, 2, 1))
    assert torch.equal(alone[:, 0], found[:, 0])


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("has_dependent_launch", "has_much_shared"):
        monkeypatch.setattr(mxfp4_cuda, name, lambda _: True)
    monkeypatch.setattr(mxfp4_cuda.program, "available", lambda: True)


@pytest.mark.usefixtures("on_hopper")
def test_what_the_kernel_does_not_compute_is_refused() -> None:
    cpu = torch.device("cpu")
    (x, _), weights = drawn(cpu, 1), made(cpu, "silu", True)
    assert takes(x, CHOSEN, weights)
    assert not takes(x[:0], CHOSEN, weights)
    assert not takes(x.half(), CHOSEN, weights)
    assert not takes(x[:, :312], CHOSEN, weights)
    assert not takes(x.T.contiguous().T.expand(2, -1), CHOSEN, weights)
    assert not takes(torch.cat([x[0, :1], x[0]])[None, 1:], CHOSEN, weights)  # 2 bytes further
    assert takes(drawn(cpu, 40)[0], CHOSEN, weights)
    assert not takes(drawn(cpu, 41)[0], CHOSEN, weights)  # more than 16 rows an expert
    assert weights.down_bias is not None
    rounded = replace(weights.down, input=Fp8Input())
    for changed in (
        replace(weights, weighs_input=True),
        replace(weights, activation=Activation("gelu")),
        replace(weights, down_bias=weights.down_bias.float()),
        replace(weights, down=rounded),
        replace(weights, gate_up=replace(weights.gate_up, first=Mxfp4Weight(x, x))),
    ):
        assert not takes(x, CHOSEN, changed)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("name", ["has_dependent_launch", "has_much_shared"])
def test_device_that_does_not_run_the_kernel_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    (x, _), weights = drawn(cpu, 1), made(cpu, "silu", False)
    assert takes(x, CHOSEN, weights)
    monkeypatch.setattr(mxfp4_cuda, name, lambda _: False)
    assert not takes(x, CHOSEN, weights)


def test_few_rows_take_the_kernel_of_the_format(
    place: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    (x, chosen), weights = drawn(place, 3), made(place, "silu", False)
    monkeypatch.setattr(mxfp4_cuda, "takes", computes)
    expected = mxfp4_cuda.experts(x, chosen, weights)
    assert torch.equal(experts(x, chosen, weights), expected)
    room = room_for_parts(x, CHOSEN, weights, 1)
    assert room is not None
    found = experts(x, chosen, weights, room)
    assert len(room) == len(found) + 1
    assert found.data_ptr() == room.data_ptr()
    assert torch.equal(found, expected)
    monkeypatch.setattr(mxfp4_cuda, "experts", lambda *_: pytest.fail("refused, but taken"))
    experts(x, chosen, replace(weights, weighs_input=True))
    experts(x, chosen, weights, backend="torch")


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("name", ["HIDDEN", "INNER"])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_columns_that_do_not_fill_half_a_chunk_are_refused(
    rows: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    assert takes(drawn(cpu, rows)[0], CHOSEN, made(cpu, "silu", False))
    monkeypatch.setitem(globals(), name, 288)
    assert not takes(drawn(cpu, rows)[0], CHOSEN, made(cpu, "silu", False))


def test_tiles_follow_the_rows() -> None:
    """Of GPT-OSS-20B and 120B: 4 of 32 and of 128 experts."""
    one, few, many = RowTile(), Tile(15, 3, 1), Tile(15, 3, 4)
    small = [tile_for(rows, 4, 32) for rows in (1, 4, 5, 16, 17, 128, 129)]
    assert small == [one, one, few, few, many, many, None]
    assert [tile_for(rows, 4, 128) for rows in (4, 16, 512, 513)] == [one, few, many, None]


def test_what_a_tile_does_not_fit_another_takes() -> None:
    """One chunk of columns, 9 experts a row, 4,000 slots, and no half of a chunk."""
    few, many = Tile(15, 3, 1), Tile(15, 3, 4)
    assert tile_for(4, 4, 32, [product(4, 2880)]) == RowTile()
    assert tile_for(4, 4, 32, [product(4, 128)]) == few
    assert tile_for(4, 9, 32, [replace(product(4, 2880), num_chosen=9)]) == few
    wide = replace(product(500, 2880), num_chosen=8, num_experts=256)
    assert tile_for(64, 8, 256, [replace(wide, num_rows=64)]) == many
    assert tile_for(500, 8, 256, [wide]) == few
    assert tile_for(4, 4, 32, [product(4, 2848)]) is None


def product(rows: int, columns: int) -> Product:
    return Product(rows, 4, 32, columns, columns, is_down=False)


def test_blocks_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On 132 multiprocessors; and each has a tile of its own."""
    run_on(132, monkeypatch)
    cpu, wide = torch.device("cpu"), product(64, 2880)
    assert Tile(12, 4, 4).grid(wide, cpu) == (132, 1, 1)
    assert Tile(12, 4, 4).grid(product(1, 64), cpu) == (4 * 4, 1, 1)
    assert Tile(15, 3, 4).fits(wide)
    assert not Tile(15, 4, 4).fits(wide)


@pytest.mark.parametrize("name", slow_but(["clamped"], ["clamped", "silu"]))
def test_row_has_the_same_bits_in_all_tiles(name: str, place: torch.device) -> None:
    """Those of the table, of both kernels."""
    x, chosen = drawn(place, 33)
    weights = made(place, name, True)
    sizes = (1, 3, 5, 9)
    tiles = {tile_for(rows, CHOSEN, EXPERTS) for rows in (*sizes, 33)}
    assert tiles == {RowTile(), Tile(15, 3, 1), Tile(15, 3, 4)}
    found = mxfp4_cuda.experts(x, chosen, weights)
    for rows in sizes:
        few = mxfp4_cuda.experts(*first(x, chosen, rows), weights)
        assert torch.equal(few, found[:, :rows])
    close(found.sum(0).bfloat16(), experts_ref.experts(x, chosen, weights))


@pytest.mark.parametrize("blocks", [1, 7])
def test_row_has_the_same_bits_however_blocks_share_the_tiles(
    blocks: int, place: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has all of them, and some that have two experts."""
    x, chosen = drawn(place, 9)
    weights = made(place, "clamped", True)
    run_on(blocks, monkeypatch)
    tiles = {1: RowTile(), 4: Tile(5, 3, 1), 9: Tile(3, 2, 4)}
    found = [
        mxfp4_cuda.experts(*first(x, chosen, rows), weights, tile)[:, 0]
        for rows, tile in tiles.items()
    ]
    assert all(torch.equal(one, found[0]) for one in found)
