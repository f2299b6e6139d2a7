"""The gated delta rule: its forms agree, and Triton's kernels with them."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specengine.kernels.delta import delta_rule
from specengine.kernels.delta.types import (
    NodeBatch,
    StatePaths,
)
from specengine.kernels.dispatch import MOST_SHARED
from tests.kernels import offline_triton
from tests.kernels.delta_world import (
    CPU,
    SHAPE,
    World,
    assert_near,
    cut,
    decode,
    inputs,
    make_world,
    moved,
)

# Numbers of the nodes that each node sees, itself included: two branches, a leaf of the root.
TREE = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 1, 3, 5], [0, 6]]


@pytest.fixture
def world() -> World:
    return make_world()


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
        "_prompt_tokens_kernel",
        "_prompt_rule_kernel",
        "_tail_kernel",
        "_keys_kernel",
        "_values_kernel",
        "_solve_kernel",
        "_memory_kernel",
    }
    chunked = {"_solve_kernel", "_memory_kernel"}
    assert max(size for name, size in shared.items() if name not in chunked) <= 16_384
    assert max(shared.values()) <= MOST_SHARED


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 4, 8])
def test_kernels_on_a_gpu_equal_the_reference(dtype: torch.dtype, width: int) -> None:
    from benchmarks.kernels.delta_rule import compare

    compare(dtype, width)
