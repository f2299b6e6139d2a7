"""The gated delta rule: its forms agree, and Triton's kernels with them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from specengine.kernels.delta import delta_rule
from specengine.kernels.delta.types import (
    DeltaInputs,
    DeltaShape,
    DeltaState,
    DeltaWeights,
    NodeBatch,
    NodeUpdates,
    PromptBatch,
    Save,
    StatePaths,
)
from specengine.kernels.dispatch import MOST_SHARED
from tests.kernels import offline_triton

SHAPE = DeltaShape(num_key_heads=2, num_heads=4, key_dim=8, value_dim=12, conv_width=4)
SLOTS = 7  # of the state pool
CPU = torch.device("cpu")
T = TypeVar("T")
# A card takes prompts of float32 token by token; its chunks are of other types (below).
IN_INTERPRETER = pytest.mark.parametrize("device", ["interpreter"], indirect=True)
# Numbers of the nodes that each node sees, itself included: two branches, a leaf of the root.
TREE = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 1, 3, 5], [0, 6]]


@dataclass
class World:
    weights: DeltaWeights
    states: list[DeltaState]  # two layers
    updates: list[NodeUpdates]

    def copy(self, device: torch.device | None = None) -> World:
        """device: of the copy; None for the same."""
        weights = moved(self.weights, device or self.weights.conv_CW.device)
        return World(weights, _copies(self.states, device), _copies(self.updates, device))

    def assert_near(self, other: World) -> None:
        pairs = zip([*self.states, *self.updates], [*other.states, *other.updates], strict=True)
        for one, its in pairs:
            for field in fields(one):
                found, expected = getattr(one, field.name), getattr(its, field.name)
                if isinstance(one, DeltaState):  # row 0 pads, and means nothing
                    found, expected = found[1:], expected[1:]
                assert_near(found, expected)


def _copies(layers: list[Any], device: torch.device | None = None) -> list[Any]:
    """Views of tensors of all layers."""
    stacked = [
        torch.stack([getattr(one, field.name) for one in layers]).to(device)
        for field in fields(layers[0])
    ]
    return [type(layers[0])(*parts) for parts in zip(*stacked, strict=True)]


def moved(one: T, device: torch.device) -> T:
    """A dataclass with its tensors on the device."""
    values = [getattr(one, field.name) for field in fields(one)]  # type: ignore[arg-type]
    return type(one)(*(x.to(device) if isinstance(x, Tensor) else x for x in values))


def assert_near(found: Tensor, expected: Tensor) -> None:
    """found: of a kernel. expected: of the reference, on a CPU. A card's exp is good to 22 bits,
    and its errors add up over the tokens."""
    atol, rtol = (1e-4, 1e-3) if found.is_cuda else (2e-6, 2e-5)
    torch.testing.assert_close(found.cpu(), expected, atol=atol, rtol=rtol)


@pytest.fixture
def world() -> World:
    torch.manual_seed(3)
    C, M, K, E = SHAPE.channels, SHAPE.num_heads, SHAPE.key_dim, SHAPE.value_dim
    weights = DeltaWeights(torch.randn(C, 4), torch.randn(M), torch.randn(M))
    states = [DeltaState(torch.randn(SLOTS, 3, C), torch.randn(SLOTS, M, K, E)) for _ in range(2)]
    updates = [
        NodeUpdates(
            torch.zeros(20, C), torch.zeros(20, 2, K), torch.zeros(20, M, E), torch.zeros(20, M)
        )
        for _ in range(2)
    ]
    return World(weights, _copies(states), _copies(updates))


def inputs(count: int, seed: int = 1, device: torch.device | None = None) -> DeltaInputs:
    """As parts of wider products, which is what layers give. The same on any device."""
    made = torch.randn(count, SHAPE.channels + 8, generator=torch.Generator().manual_seed(seed))
    mixed, write, decay = made.to(device).split([SHAPE.channels, 4, 4], -1)
    return DeltaInputs(mixed, write, decay)


def cut(given: DeltaInputs, rows: slice | list[int]) -> DeltaInputs:
    return DeltaInputs(given.mixed_TC[rows], given.write_TM[rows], given.decay_TM[rows])


def decode(world: World, given: DeltaInputs, row: int) -> Tensor:
    """One token after the other, in layer 0."""
    nodes = NodeBatch(torch.tensor([row]), torch.tensor([0, 1]), 1)
    state, updates = world.states[0], world.updates[0]
    return torch.cat(
        [
            delta_rule.decode(
                cut(given, slice(at, at + 1)), world.weights, state, updates, nodes, SHAPE
            )
            for at in range(len(given.mixed_TC))
        ]
    )


@pytest.mark.parametrize("count", [1, 2, 5, 63, 64, 65, 150])
@pytest.mark.parametrize("is_new", [False, True])
def test_prompt_in_chunks_equals_steps(count: int, is_new: bool, world: World) -> None:
    given, other = inputs(count), world.copy()
    batch = PromptBatch(torch.tensor([2]), [count], [0 if is_new else 3])
    found = delta_rule.extend(given, world.weights, world.states[0], batch, SHAPE)
    if is_new:
        other.states[0].inputs[2], other.states[0].memory[2] = 0, 0
    torch.testing.assert_close(found, decode(other, given, 2), atol=1e-5, rtol=1e-4)
    for name in ("inputs", "memory"):
        one, its = getattr(world.states[0], name), getattr(other.states[0], name)
        torch.testing.assert_close(one, its, atol=1e-5, rtol=1e-4)


def test_saved_state_is_that_behind_its_prefix(world: World) -> None:
    given, other = inputs(90), world.copy()
    saves = (Save(0, 70, 5), Save(1, 2, 4), Save(1, 9, 6))
    batch = PromptBatch(torch.tensor([1, 3]), [80, 10], [0, 4], saves)
    whole = delta_rule.extend(given, world.weights, world.states[0], batch, SHAPE)
    for row, rows, is_new, slot in (
        (1, slice(0, 70), True, 5),
        (3, slice(80, 82), False, 4),
        (3, slice(82, 89), False, 6),
    ):
        part = PromptBatch(torch.tensor([row]), [rows.stop - rows.start], [0 if is_new else 4])
        out = delta_rule.extend(cut(given, rows), other.weights, other.states[0], part, SHAPE)
        torch.testing.assert_close(out, whole[rows], atol=1e-5, rtol=1e-4)
        for name in ("inputs", "memory"):
            found = getattr(world.states[0], name)[slot]
            expected = getattr(other.states[0], name)[row]
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def tree_nodes(rows: list[int], trees: list[list[list[int]]]) -> NodeBatch:
    width = max(map(len, trees))
    mask = torch.zeros(len(rows), width + 1, width + 1, dtype=torch.bool)
    for request, tree in enumerate(trees):
        for node, seen in enumerate(tree):
            mask[request, node, seen] = True
    starts = torch.tensor([0, *accumulate(map(len, trees))])
    return NodeBatch(torch.tensor(rows), starts, width, mask)


def test_each_node_of_a_tree_follows_its_path(world: World) -> None:
    given, before = inputs(len(TREE)), world.copy()
    nodes = tree_nodes([3], [TREE])
    out = delta_rule.verify(given, world.weights, world.states[0], world.updates[0], nodes, SHAPE)
    assert torch.equal(world.states[0].memory, before.states[0].memory)
    for node, path in enumerate(TREE):
        alone, kept = before.copy(), world.copy()
        expected = decode(alone, cut(given, path), 3)[-1]
        torch.testing.assert_close(out[node], expected)
        missing = [0] * (len(TREE) - len(path))
        keep(kept, torch.tensor([[*path, *missing]]), [len(path) - 1])
        torch.testing.assert_close(kept.states[0].memory[3], alone.states[0].memory[3])
        assert torch.equal(kept.states[0].inputs[3], alone.states[0].inputs[3])


def keep(world: World, nodes_BW: Tensor, accepted: list[int]) -> None:
    rows, starts = torch.tensor([3]), torch.tensor([0])
    paths = StatePaths(rows, starts, torch.tensor(accepted), nodes_BW, nodes_BW.shape[1])
    delta_rule.keep(world.states, world.updates, paths, SHAPE)


@pytest.mark.parametrize("is_tree", [False, True])
def test_triton_verifies_and_keeps_as_the_reference(
    is_tree: bool, world: World, device: torch.device
) -> None:
    ours, nodes = world.copy(device), tree_nodes([3, 0, 5], [TREE, TREE[:1], TREE[:4]])
    if not is_tree:
        nodes = NodeBatch(nodes.rows_B, nodes.starts, nodes.width)
    for layer, seed in enumerate((1, 2)):
        outs = [
            delta_rule.verify(
                inputs(12, seed, place), one.weights, one.states[layer], one.updates[layer],
                moved(nodes, place), SHAPE, backend=backend,
            )
            for one, place, backend in ((ours, device, "triton"), (world, CPU, "torch"))
        ]  # fmt: skip
        assert_near(*outs)
    ours.assert_near(world)
    paths_BW = torch.tensor([[0, 1, 3, 5], [0, 0, 0, 0], [0, 2, 0, 0]]) if is_tree else None
    paths = StatePaths(nodes.rows_B, nodes.starts[:-1], torch.tensor([3, 0, 1]), paths_BW, 4)
    delta_rule.keep(ours.states, ours.updates, moved(paths, device), SHAPE, backend="triton")
    delta_rule.keep(world.states, world.updates, paths, SHAPE, backend="torch")
    ours.assert_near(world)


def test_triton_decodes_as_the_reference(world: World, device: torch.device) -> None:
    ours = world.copy(device)
    nodes = NodeBatch(torch.tensor([4, 0, 1]), torch.tensor([0, 1, 2, 3]), 1)
    for step in range(5):
        outs = [
            delta_rule.decode(
                inputs(3, step, place), one.weights, one.states[0], one.updates[0],
                moved(nodes, place), SHAPE, backend=backend,
            )
            for one, place, backend in ((ours, device, "triton"), (world, CPU, "torch"))
        ]  # fmt: skip
        assert_near(*outs)
    # Updates are scratch of a decode.
    World(ours.weights, ours.states, []).assert_near(World(world.weights, world.states, []))


def test_triton_takes_prompts_in_as_the_reference(world: World, device: torch.device) -> None:
    ours, saves = world.copy(device), (Save(0, 1, 6), Save(0, 4, 2), Save(2, 3, 0))
    batch = PromptBatch(torch.tensor([1, 3, 5]), [5, 1, 7], [0, 9, 2], saves)
    outs = [
        delta_rule.extend(
            inputs(13, 1, place), one.weights, one.states[0], moved(batch, place), SHAPE,
            backend=backend,
        )
        for one, place, backend in ((ours, device, "triton"), (world, CPU, "torch"))
    ]  # fmt: skip
    assert_near(*outs)
    ours.assert_near(world)


@pytest.mark.slow
def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    """Qwen3-Next's shape is among them. Shared memory is for sums alone: states stay in
    registers."""
    pytest.importorskip("triton")
    shared = offline_triton.run("tests.kernels.offline_delta", tmp_path)
    assert set(shared) == {
        "_nodes_kernel",
        "_token_kernel",
        "_step_kernel",
        "_verify_kernel",
        "_keep_memory_kernel",
        "_keep_inputs_kernel",
        "_extend_kernel",
        "_tail_kernel",
        "_keys_kernel",
        "_values_kernel",
        "_solve_kernel",
        "_memory_kernel",
    }
    chunked = {"_solve_kernel", "_memory_kernel"}
    assert max(size for name, size in shared.items() if name not in chunked) <= 16_384
    assert max(shared.values()) <= MOST_SHARED


def assert_prompts_are_taken_in_alike(given: DeltaInputs, batch: PromptBatch, world: World) -> None:
    other = world.copy()
    outs = [
        delta_rule.extend(given, world.weights, one.states[0], batch, SHAPE, backend=backend)
        for one, backend in ((world, "triton"), (other, "torch"))
    ]
    torch.testing.assert_close(*outs, atol=2e-5, rtol=1e-4)
    for name in ("inputs", "memory"):
        found, expected = (getattr(one.states[0], name)[1:] for one in (world, other))
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("are_alike", [False, True])
@IN_INTERPRETER
def test_triton_takes_long_prompts_in_as_the_reference(
    are_alike: bool, world: World, device: torch.device
) -> None:
    """Chunks that end at saves, and one after another. are_alike: all tokens have the same key, so
    that powers of a chunk's system grow beyond any digit."""
    saves = (Save(0, 1, 6), Save(0, 70, 2), Save(2, 64, 0))
    batch = PromptBatch(torch.tensor([1, 3, 5]), [150, 1, 66], [0, 9, 2], saves)
    given = inputs(217)
    if are_alike:
        given = DeltaInputs(
            given.mixed_TC[:1].expand(217, -1), given.write_TM + 9, given.decay_TM - 9
        )
    assert_prompts_are_taken_in_alike(given, batch, world)


@IN_INTERPRETER
def test_triton_takes_a_prompt_in_in_chunks(world: World, device: torch.device) -> None:
    batch = PromptBatch(torch.tensor([1, 3]), [67, 2], [4, 0], (Save(0, 65, 6),))
    assert_prompts_are_taken_in_alike(inputs(69), batch, world)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 4, 8])
def test_kernels_on_a_gpu_equal_the_reference(dtype: torch.dtype, width: int) -> None:
    from benchmarks.kernels.delta_rule import compare

    compare(dtype, width)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    ("dtype", "in_chunks"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)],
)
def test_prompts_on_a_gpu_equal_the_reference(
    dtype: torch.dtype, in_chunks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.kernels.delta_rule import compare_prompts

    monkeypatch.setattr(delta_rule, "CHUNKS_IN_TRITON", in_chunks)  # and puts it back
    compare_prompts(dtype, in_chunks)
