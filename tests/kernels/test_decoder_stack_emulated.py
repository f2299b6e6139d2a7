"""All layers in one kernel (CUDA C++) on a CPU, instruction by instruction, against PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from specengine.kernels import precompile
from specengine.kernels.cuda import program
from specengine.kernels.cuda.sm_placement import SMPlacement
from specengine.kernels.linear import decoder_stack_cuda, few_row, few_row_cuda
from specengine.kernels.linear.decoder_stack_cuda import StackBuffers
from specengine.kernels.linear.types import StackOutput, StackShape
from tests.halves import each_value
from tests.kernels.decoder_stack_cases import EPS, Lengths, World, draw_weights
from tests.kernels.emulated_cuda import Compiled
from tests.kernels.half_precision import close

SHAPE = StackShape(192, 3, 1, 64, 256, 2)
TREE = [-1, 0, 0, 1, 2]
LARGE_TREE = [-1, 0, 0, 0, 1, 1, 2, 4, 4, 7, 7, 9, 10]


@pytest.fixture(autouse=True)
def _emulated(emulated: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_stack_cuda, "compiled", emulated)
    monkeypatch.setattr(few_row_cuda, "compiled", emulated)
    monkeypatch.setattr(decoder_stack_cuda, "multiprocessors", lambda device: 8)
    monkeypatch.setattr(decoder_stack_cuda, "_tables", decoder_stack_cuda._Tables())
    StackBuffers.of.cache_clear()
    SMPlacement.of.cache_clear()
    torch.manual_seed(0)


def agree(given: tuple[StackOutput, Tensor], expected: tuple[StackOutput, Tensor]) -> None:
    close(given[0].stream, expected[0].stream)
    assert len(given[0].layer_features) == len(expected[0].layer_features)
    for one, other in zip(given[0].layer_features, expected[0].layer_features, strict=True):
        close(one, other)
    close(given[1][:, :, 1:], expected[1][:, :, 1:])


@pytest.mark.parametrize(
    ("lengths", "trees", "first_keys"),
    [
        ([Lengths(0, 1), Lengths(40, 1), Lengths(33, 1)], None, [0, 7, 50]),
        ([Lengths(35, 5), Lengths(3, 5)], [TREE, TREE], None),
        ([Lengths(30, 13)], [LARGE_TREE], [11]),
        ([Lengths(20, 10), Lengths(7, 0), Lengths(0, 1), Lengths(4, 2)], None, None),
        ([Lengths(1700, 1), Lengths(5, 1)], None, [370, 0]),
        ([Lengths(1060, 1)] * 3, None, [0, 1060, 900]),
    ],
    ids=[
        "first keys",
        "trees",
        "a large tree",
        "many rows beside few and none",
        "shares",
        "sweeps of shares",
    ],
)
def test_it_gives_what_single_operations_give(
    lengths: list[Lengths], trees: list[list[int]] | None, first_keys: list[int] | None
) -> None:
    weights = draw_weights(SHAPE, 1800, "cpu")
    world = World.draw(weights, lengths, trees, first_keys)
    agree(world.run(weights, "cuda", (0, 1)), world.run(weights, "torch", (0, 1)))


def test_launches_of_other_sizes_by_turns() -> None:
    """Each set of places is used again, for more rows and for fewer."""
    weights = draw_weights(SHAPE, 800, "cpu")
    drawn = [[Lengths(700, 2)], [Lengths(20, 13)], [Lengths(3, 1)]]
    worlds = [World.draw(weights, lengths) for lengths in drawn]
    expected = [world.run(weights, "torch", (0, 1)) for world in worlds]
    for turn in (0, 2, 1, 0):
        agree(worlds[turn].run(weights, "cuda", (0, 1)), expected[turn])


def test_blocks_that_have_no_share_of_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_stack_cuda, "spare_of", lambda blocks: 3)
    shape = StackShape(96, 2, 1, 64, 128, 3)  # 52 rows of gates a block: no whole eights
    weights = draw_weights(shape, 800, "cpu")
    world = World.draw(weights, [Lengths(400, 2), Lengths(9, 1)])
    agree(world.run(weights, "cuda"), world.run(weights, "torch"))


PLACEMENTS = {
    "as said": [3, 0, 7, 1, 6, 2, 5, 4],
    "one for all": [5] * 8,
    "half of them": [0, 1, 2, 3, -1, -1, -1, -1],
    "one again, late": [5, 1, 2, 3, 4, 6, 7, 5],
}


@pytest.mark.parametrize(("said", "spare"), each_value(1, PLACEMENTS, [0, 3]))
def test_wherever_blocks_sit(said: str, spare: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """None has the number of another, whichever block comes where and when, and though some
    blocks have nothing to do; and all are free afterwards."""
    numbers = PLACEMENTS[said]
    monkeypatch.setattr(decoder_stack_cuda, "spare_of", lambda blocks: spare)
    weights = draw_weights(StackShape(96, 2, 1, 64, 128, 3), 800, "cpu")
    world = World.draw(weights, [Lengths(20, 2)])
    placement = SMPlacement(8, world.x.device)
    placement.numbers[:8] = torch.tensor(numbers)
    expected = world.run(weights, "torch")
    with patch.object(SMPlacement, "of", return_value=placement):
        for _ in range(2):
            agree(world.run(weights, "cuda"), expected)
            assert placement.taken.tolist() == [0] * 8
    assert sorted(set(placement.seen.tolist()) - {-1}) == [
        sm for sm, number in enumerate(numbers) if number < 0
    ]


@pytest.mark.parametrize("requests", [0, 1])
def test_rows_of_no_request_keep_nobody_waiting(requests: int) -> None:
    """A graph may be warmed up on a batch that says nothing yet."""
    weights = draw_weights(SHAPE, 800, "cpu")
    world = World.draw(weights, [Lengths(30, 3), Lengths(5, 2)])
    expected, expected_kv = world.only(0).run(weights, "torch", (0,))
    bounds = torch.tensor([0, 3 * requests, 3 * requests])
    less = replace(world, batch=replace(world.batch, qo_indptr=bounds))
    given, kv = less.run(weights, "cuda", (0,))
    assert given.stream.shape == world.x.shape
    if requests:
        close(given.stream[:3], expected.stream)
        close(given.layer_features[0][:3], expected.layer_features[0])
        close(kv[:, :, 1:], expected_kv[:, :, 1:])


@pytest.mark.parametrize(("rows", "chosen"), [(0, False), (2, False), (5, True)])
def test_seats_are_chosen_where_all_rows_belong_to_requests(
    rows: int, chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for a warm-up of rows of no request, whose blocks have nothing to tell each other."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    weights = draw_weights(SHAPE, 100, "cpu")
    world = World.draw(weights, [Lengths(30, 3), Lengths(5, 2)])
    bounds = torch.tensor([0, min(rows, 3), rows])
    placement = SMPlacement(8, world.x.device)
    placement.are_chosen = False
    with (
        patch.object(SMPlacement, "of", return_value=placement),
        patch.object(decoder_stack_cuda, "seconds_of_launch", return_value=1.0),
    ):
        replace(world, batch=replace(world.batch, qo_indptr=bounds)).run(weights, "cuda")
    assert placement.are_chosen == chosen
    assert (placement.numbers >= 0).sum() == 8 * chosen


def test_products_have_the_bits_of_few_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests see their own token alone, so that heads are its values."""

    def tile_for(hidden: int, gated: bool) -> few_row_cuda.Tile:
        """More warps share the depth of the heads than a block has here."""
        tile = measured(hidden, gated)
        return replace(tile, warps=14, unroll=1) if hidden == 7 * 64 else tile

    measured = few_row_cuda.tile_for
    monkeypatch.setattr(few_row_cuda, "tile_for", tile_for)
    monkeypatch.setattr(decoder_stack_cuda, "tile_for", tile_for)
    weights = draw_weights(StackShape(64, 7, 1, 64, 160, 1), 10, "cpu")
    world = World.draw(weights, [Lengths(0, 1)] * 3)
    given, kv = world.run(weights, "cuda")
    (layer,), x = weights.layers, world.x
    qkv = few_row.norm_linear(x, layer.input_gain, EPS, layer.qkv, backend="cuda")
    values = qkv[:, -64:]
    assert torch.equal(kv[0, 1, world.kv.loc, 0], values)
    x = few_row.linear_add(values.repeat(1, 7), layer.out, x, backend="cuda")
    gates = few_row.norm_gated_linear(x, layer.gain, EPS, layer.gate_up, backend="cuda")
    x = few_row.linear_add(gates, layer.down, x, backend="cuda")
    assert torch.equal(given.stream, x)


@pytest.mark.parametrize(
    "lengths",
    [[Lengths(0, 17)], [Lengths(5, 1)] * 9],
    ids=["rows", "heads"],
)
def test_what_it_cannot_take_is_refused(lengths: Sequence[Lengths]) -> None:
    weights = draw_weights(SHAPE, 20, "cpu")
    with pytest.raises(ValueError, match="too"):
        World.draw(weights, lengths).run(weights, "cuda")


def test_precompiling_compiles_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, int]] = []

    def binary(source: object, defines: tuple[tuple[str, int], ...], device: int) -> bytes:
        asked.append(dict(defines))
        return b""

    weights = draw_weights(SHAPE, 40, "cpu")
    world = World.draw(weights, [Lengths(30, 3)])
    with monkeypatch.context() as patched, precompile.precompile():
        patched.setattr(program, "_binary", binary)
        patched.setattr(decoder_stack_cuda, "compiled", program.compiled)
        given, _ = world.run(weights, "cuda", (0, 1))
    assert [defines["HALVES"] for defines in asked] == [1]
    assert given.stream.shape == world.x.shape
    assert [one.shape for one in given.layer_features] == [world.x.shape] * 2
    assert StackBuffers.of.cache_info().currsize == 0
    agree(world.run(weights, "cuda"), world.run(weights, "torch"))
