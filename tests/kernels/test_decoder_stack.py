"""All layers in one kernel on a GPU, against PyTorch (test_decoder_stack_emulated.py: on a CPU)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specengine.kernels.linear.decoder_stack import decoder_stack, fits
from specengine.kernels.linear.types import StackOutput, StackShape
from tests.device import ON_HOPPER
from tests.kernels.decoder_stack_cases import Lengths, World, draw_weights, in_float
from tests.kernels.half_precision import close

SHAPE = StackShape(576, 9, 3, 64, 1536, 30)
FEW = replace(SHAPE, num_layers=4)  # over 30 layers roundings of bfloat16 add up
TREE = [-1, 0, 0, 1, 2]

pytestmark = [*ON_HOPPER, pytest.mark.usefixtures("seeded")]


def agree(given: tuple[StackOutput, Tensor], expected: tuple[StackOutput, Tensor]) -> None:
    close(given[0].stream, expected[0].stream)
    for one, other in zip(given[0].layer_features, expected[0].layer_features, strict=True):
        close(one, other)
    close(given[1][:, :, 1:], expected[1][:, :, 1:])


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(FEW, torch.bfloat16), (SHAPE, torch.float16)],
    ids=["few layers", "many layers"],
)
@pytest.mark.parametrize(
    ("lengths", "trees", "first_keys"),
    [
        ([Lengths(5, 4)], None, None),
        ([Lengths(0, 1), Lengths(400, 1), Lengths(33, 1)], None, [0, 7, 50]),
        ([Lengths(2700, 4)], None, None),
        ([Lengths(3000, 4)] * 4, None, None),
        ([Lengths(100, 1)] * 16, None, None),
        ([Lengths(35, 5), Lengths(3, 5)], [TREE, TREE], None),
        ([Lengths(20, 13)], None, None),
        ([Lengths(160, 16)], [[-1, *((node - 1) // 4 for node in range(1, 16))]], None),
    ],
    ids=[
        "chain",
        "first keys",
        "shares",
        "sweeps",
        "16 requests",
        "trees",
        "many rows",
        "a large tree",
    ],
)
def test_it_gives_what_single_operations_give(
    lengths: list[Lengths],
    trees: list[list[int]] | None,
    first_keys: list[int] | None,
    shape: StackShape,
    dtype: torch.dtype,
) -> None:
    weights = draw_weights(shape, 3100, "cuda", dtype)
    world = World.draw(weights, lengths, trees, first_keys)
    assert fits(world.x, shape, world.batch)
    captured = 0, 2, shape.num_layers - 3
    expected = world.run(weights, "torch", captured)
    for _ in range(3):  # each set of places is used again
        agree(world.run(weights, "cuda", captured), expected)


def test_roundings_over_many_layers_stay_roundings() -> None:
    """bfloat16 keeps eight bits: the kernel may differ from float32 by little more than single
    operations in bfloat16 do."""
    weights = draw_weights(SHAPE, 800, "cuda")
    world = World.draw(weights, [Lengths(300, 4), Lengths(40, 2)])
    true = world.in_float().run(in_float(weights), "torch")[0].stream
    single = (world.run(weights, "torch")[0].stream.float() - true).abs()
    given = (world.run(weights, "cuda")[0].stream.float() - true).abs()
    assert float(given.mean()) < 1.25 * float(single.mean())
    assert float(given.max()) < 2 * float(single.max())


def test_launches_of_other_sizes_by_turns() -> None:
    weights = draw_weights(SHAPE, 800, "cuda")
    drawn = [[Lengths(700, 2)], [Lengths(20, 13)], [Lengths(3, 1)], [Lengths(90, 1)] * 7]
    worlds = [World.draw(weights, lengths) for lengths in drawn]
    first = [world.run(weights, "cuda")[0].stream for world in worlds]
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for turn in torch.randint(len(worlds), (400,)).tolist():
        different += (worlds[turn].run(weights, "cuda")[0].stream != first[turn]).any()
    assert int(different) == 0


def test_rows_of_no_request_keep_nobody_waiting() -> None:
    """A graph may be warmed up on a batch that says nothing yet."""
    weights = draw_weights(FEW, 800, "cuda")
    world = World.draw(weights, [Lengths(30, 3), Lengths(5, 2)])
    expected, _ = world.only(0).run(weights, "cuda")
    for rows in (0, 3):
        bounds = torch.tensor([0, rows, rows], device="cuda")
        less = replace(world, batch=replace(world.batch, qo_indptr=bounds))
        given, _ = less.run(weights, "cuda")
        torch.cuda.synchronize()
        assert torch.equal(given.stream[:rows], expected.stream[:rows])


@pytest.fixture
def side_stream() -> Iterator[torch.cuda.Stream]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield stream
    torch.cuda.current_stream().wait_stream(stream)


def test_a_graph_stays_right_while_requests_grow(side_stream: torch.cuda.Stream) -> None:
    weights = draw_weights(FEW, 1600, "cuda")
    world = World.draw(weights, [Lengths(1500, 2), Lengths(1200, 2)])
    batch, kv = world.batch, world.kv

    def grow(by: int) -> None:
        """Each request's first tokens are those of the text that was drawn."""
        batch.seq_lens.copy_(torch.tensor([by + 2, by // 2 + 2]))
        lens = batch.seq_lens.repeat_interleave(2)
        batch.positions.copy_(lens - 2 + torch.tensor([0, 1] * 2, device="cuda"))
        rows = batch.req_pool_indices.repeat_interleave(2)
        kv.loc.copy_(batch.req_to_token[rows, batch.positions])

    decoder_stack(world.x, weights, kv, batch, (1,), backend="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side_stream):
        given = decoder_stack(world.x, weights, kv, batch, (1,), backend="cuda")
    for by in (0, 2, 31, 350, 352, 360, 710, 1100, 1400):
        grow(by)
        before = replace(kv, k=[one.clone() for one in kv.k], v=[one.clone() for one in kv.v])
        graph.replay()
        expected = decoder_stack(world.x, weights, before, batch, (1,), backend="torch")
        close(given.stream, expected.stream)
        close(given.layer_features[0], expected.layer_features[0])
        for one, other in zip([*kv.k, *kv.v], [*before.k, *before.v], strict=True):
            close(one[1:], other[1:])


def test_the_same_bits_a_thousand_times() -> None:
    """What comes too early or too late shows itself once in many runs."""
    weights = draw_weights(SHAPE, 800, "cuda")
    for lengths in ([Lengths(300, 4)], [Lengths(700, 1)] * 7, [Lengths(30, 3)] * 5):
        world = World.draw(weights, lengths)
        first = world.run(weights, "cuda")[0].stream
        different = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(500):
            different += (world.run(weights, "cuda")[0].stream != first).any()
        assert int(different) == 0


def test_a_row_keeps_its_bits_whatever_stands_beside_it() -> None:
    weights = draw_weights(SHAPE, 800, "cuda")
    lengths = [Lengths(90, 3), Lengths(7, 4), Lengths(200, 2)]
    world = World.draw(weights, lengths)
    whole = world.run(weights, "cuda")[0].stream
    alone = world.only(1).run(weights, "cuda")[0].stream
    assert torch.equal(whole[3:7], alone)
