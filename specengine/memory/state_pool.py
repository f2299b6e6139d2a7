"""The recurrent state of requests: what layers keep of a text whatever its length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specengine.kernels.delta import delta_rule
from specengine.kernels.delta.types import DeltaShape, DeltaState, NodeUpdates, StatePaths


@dataclass(frozen=True)
class StateShape:
    """What a request, and a verified node, leave behind in the layers that keep recurrent state.
    runner.memory.kept_state asks the layers for it."""

    layer_ids: tuple[int, ...]  # ascending
    delta: DeltaShape
    dtype: torch.dtype  # of activations

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of a request's state, or of a snapshot."""
        delta = self.delta
        memory = delta.num_heads * delta.key_dim * delta.value_dim * 4
        inputs = (delta.conv_width - 1) * delta.channels * self.dtype.itemsize
        return len(self.layer_ids) * (memory + inputs)

    @property
    def bytes_per_node(self) -> int:
        delta = self.delta
        numbers = delta.key_size + delta.value_size + delta.num_heads
        return len(self.layer_ids) * (4 * numbers + delta.channels * self.dtype.itemsize)


@dataclass(frozen=True)
class StateSizes:
    """rows: of the page table, row 0 included. nodes: of the largest verification."""

    rows: int
    snapshots: int = 0
    nodes: int = 0

    def num_bytes(self, shape: StateShape) -> int:
        slots = self.rows + self.snapshots
        return slots * shape.bytes_per_slot + self.nodes * shape.bytes_per_node


class StatePool:
    """Slot r is that of the request in row r of the page table; behind the rows lie snapshots of
    the prefix cache. Row 0 belongs to no request: what is there is read as zeros.

    A forward whose tokens are all kept moves the slots of its requests on. A verification leaves
    them as they are, and leaves the updates of its nodes in rows of its own; `keep_paths` then
    moves the slots on by those of the accepted paths. So between the two no other verification may
    run.
    """

    def __init__(self, shape: StateShape, sizes: StateSizes, device: torch.device) -> None:
        self.shape, self.sizes, self.device = shape, sizes, device
        delta, L, P = shape.delta, len(shape.layer_ids), sizes.rows + sizes.snapshots
        N = max(sizes.nodes, sizes.rows)  # a decode has a node a request

        def zeros(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(L, *size, dtype=dtype, device=device)

        C, M, E = delta.channels, delta.num_heads, delta.value_dim
        self._inputs = zeros(P, delta.conv_width - 1, C, dtype=shape.dtype)
        self._memory = zeros(P, M, delta.key_dim, E)
        self._states = [DeltaState(*pair) for pair in zip(self._inputs, self._memory, strict=True)]
        self._updates = [
            NodeUpdates(*parts)
            for parts in zip(
                zeros(N, C, dtype=shape.dtype),
                zeros(N, delta.num_key_heads, delta.key_dim),
                zeros(N, M, E),
                zeros(N, M),
                strict=True,
            )
        ]
        self._places = {layer: place for place, layer in enumerate(shape.layer_ids)}

    def state(self, layer_id: int) -> DeltaState:
        return self._states[self._places[layer_id]]

    def updates(self, layer_id: int) -> NodeUpdates:
        return self._updates[self._places[layer_id]]

    def keep_paths(self, paths: StatePaths) -> None:
        """Move the slots of requests on to the last node of each accepted path."""
        delta_rule.keep(self._states, self._updates, paths, self.shape.delta)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """From slot to slot, in this order, on the current stream."""
        for source, target in pairs:
            self._inputs[:, target] = self._inputs[:, source]
            self._memory[:, target] = self._memory[:, source]
