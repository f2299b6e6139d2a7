"""A small gated delta rule: weights, states and inputs for tests of its forms."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypeVar

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
)

SHAPE = DeltaShape(num_key_heads=2, num_heads=4, key_dim=8, value_dim=12, conv_width=4)
SLOTS = 7  # of the state pool
CPU = torch.device("cpu")
T = TypeVar("T")


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


def make_world() -> World:
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
