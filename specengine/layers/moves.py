"""Which tensors of a checkpoint go where, apart from how their bytes get there.

`fill_places` plans: it checks names, types and shapes of all tensors, which are not read for it,
and lists moves. Then a mover carries the list out. The loader gives one (runner/loader/mover.py)
that reads files in several threads; without one, a tensor is copied when it is planned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Move:
    """One copy: `tensor` on the host to `place`, of the same shape. name: of the checkpoint's
    tensor of which this is a part, for what is said of errors."""

    name: str
    place: Tensor
    tensor: Tensor


class Mover(Protocol):
    """Moves tensors that are views of files, in an order of its own."""

    def owns(self, tensor: Tensor) -> bool:
        """Whether the tensor is a view of a file that this reads."""
        ...

    def move(self, moves: Sequence[Move]) -> None:
        """Returns when all bytes are in place. Where it raises, places hold anything."""
        ...


_mover: ContextVar[Mover | None] = ContextVar("mover", default=None)


@contextmanager
def moving_with(mover: Mover) -> Iterator[None]:
    """Plans that are made in the body are carried out by `mover`."""
    token = _mover.set(mover)
    try:
        yield
    finally:
        _mover.reset(token)


class Plan:
    """Moves that are still to be made. No place may be planned twice: moves have no order."""

    def __init__(self) -> None:
        self.mover = _mover.get()
        self.moves: list[Move] = []

    def add(self, name: str, place: Tensor, tensor: Tensor) -> None:
        """Copy `tensor` to `place` by the time `carry_out` returns. What was computed, and so is no
        view of a file, is copied at once: a plan keeps no bytes."""
        if self.mover is not None and self.mover.owns(tensor):
            self.moves.append(Move(name, place, tensor))
        else:
            place.copy_(tensor)

    def moved(self, name: str, tensor: Tensor, device: torch.device) -> Tensor:
        """`tensor.to(device)`, with the bytes there when `carry_out` returns."""
        if tensor.device == device or self.mover is None or not self.mover.owns(tensor):
            return tensor.to(device)
        place = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        self.add(name, place, tensor)
        return place

    def carry_out(self) -> None:
        moves, self.moves = self.moves, []
        if self.mover is not None and moves:
            self.mover.move(moves)
