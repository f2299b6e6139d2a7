from __future__ import annotations

import torch

from specengine.kernels.delta.types import DeltaShape, StatePaths
from specengine.memory.state_pool import StatePool, StateShape, StateSizes

QWEN3_NEXT = DeltaShape(num_key_heads=16, num_heads=32, key_dim=128, value_dim=128, conv_width=4)
SMALL = DeltaShape(num_key_heads=1, num_heads=2, key_dim=3, value_dim=4, conv_width=4)
CPU = torch.device("cpu")


def test_bytes_are_those_of_the_tensors() -> None:
    layers = tuple(layer for layer in range(48) if (layer + 1) % 4)
    shape = StateShape(layers, QWEN3_NEXT, torch.bfloat16)
    assert shape.bytes_per_slot == 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    sizes = StateSizes(rows=3, snapshots=2, nodes=7)
    small = StateShape((1, 4), SMALL, torch.float32)
    pool = StatePool(small, sizes, CPU)
    tensors = [*vars(pool.state(1)).values(), *vars(pool.updates(1)).values()]
    assert 2 * sum(one.numel() * one.itemsize for one in tensors) == sizes.num_bytes(small)


def test_copies_happen_in_their_order_in_every_layer() -> None:
    pool = StatePool(StateShape((0, 2), SMALL, torch.float32), StateSizes(3, 2), CPU)
    for layer in (0, 2):
        for slot in range(5):
            pool.state(layer).memory[slot] = 10 * layer + slot
            pool.state(layer).inputs[slot] = 10 * layer + slot
    pool.copy([(1, 3), (2, 1), (3, 2)])
    for layer in (0, 2):
        for found in (pool.state(layer).memory, pool.state(layer).inputs):
            slots = found.flatten(1)[:, 0].tolist()
            assert slots == [10 * layer + one for one in (0, 2, 1, 1, 4)]


def test_nothing_stands_of_a_request_with_no_accepted_node() -> None:
    pool = StatePool(StateShape((0,), SMALL, torch.float32), StateSizes(3, 0, 4), CPU)
    pool.state(0).memory.fill_(2.0)
    pool.updates(0).decays.fill_(0.5)
    rows, starts, accepted = torch.tensor([1, 2]), torch.tensor([0, 2]), torch.tensor([-1, 1])
    pool.keep_paths(StatePaths(rows, starts, accepted, None, 2))
    assert pool.state(0).memory[1:].flatten(1)[:, 0].tolist() == [2.0, 0.5]
