"""A device round whose last part waits for the token masks of grammars."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specengine.core.platform import Event, Graph
from specengine.core.request import Req
from specengine.core.transfer import pinned
from specengine.engine.round.round import BoundRound


class GrammarRound:
    """A round in which grammars constrain some requests: a graph a step, and before the last of
    them the token masks. What the steps leave for each other lies in the graphs' pool: between
    `replay` and `finish` no other graph may run."""

    def __init__(self, bound: BoundRound, graphs: Sequence[Graph], event: Event) -> None:
        self.bound = bound
        self._draft, self._verify, self._accept = graphs
        copy = torch.zeros(bound.host_copy().shape, dtype=torch.int64)
        self._copy = pinned(copy, bound.rows_B.device) if bound.key.num_steps else copy
        self._copied = event

    def replay(self) -> None:
        """Launch what needs no masks."""
        self._draft.replay()
        if self.bound.key.num_steps:
            self._copy.copy_(self.bound.host_copy(), non_blocking=True)
            self._copied.record()
        self._verify.replay()

    def finish(self, reqs: list[Req]) -> dict[int, list[int]]:
        """Make the masks while the device verifies, and launch the rest. The requests' grammars
        are in the states after the tokens that the round starts from. Returns KeptDepths."""
        if self.bound.key.num_steps:
            self._copied.synchronize()
        depths = self.bound.send_masks(reqs, self._copy)
        self._accept.replay()
        return depths
