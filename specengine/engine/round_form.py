"""Graphs of rounds, told apart; and rounds that are on their way."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specengine.core.request import Req
from specengine.engine.row_choices import BEST, Choosing


class Form(NamedTuple):
    """What a graph was captured for. A tuple, for it is looked up several times a round."""

    batch_size: int
    num_steps: int
    choosing: Choosing = BEST
    asleep: bool = False  # the drafter does not look
    num_nodes: int | None = None  # of smaller trees, root included
    model_steps: int | None = None  # as in Wish; deeper than the model drafts, None is all it can


class Wish(NamedTuple):
    """What a round may be. num_drafted: levels of each request, at most the deepest's num_steps.
    asleep: the drafter does not look; then nothing is drafted. num_nodes: of a tree, root included,
    where it is to be smaller than it could be. drafted_nodes: of trees that the host has drafted,
    of each request, root left out. model_steps: where some requests have drafts of text beside a
    model, how deep that drafts for the others; 0: for nobody. None: nobody has such drafts.
    of_text: as in core.spec.DraftProposal."""

    num_drafted: list[int]
    asleep: bool = False
    num_nodes: int | None = None
    drafted_nodes: list[int] | None = None
    model_steps: int | None = None
    of_text: list[bool] | None = None


class RoundGraph(Protocol):
    """A CUDA graph, or several that are launched one after the other."""

    def replay(self) -> None: ...


# Of requests that a grammar rules, by index into the batch: how deep the drafts lie that it leaves.
LeftDepths = dict[int, list[int]]


class Flight(NamedTuple):
    """A round on its way. What it decides is in `outcome` once `landed` has passed."""

    reqs: list[Req]
    num_drafted: list[int]
    # int64 [B, 2 * num_steps + 3], pinned: accepted drafts, the target's tokens, and of trees the
    # nodes that they stand at; of weighed ones how many nodes there were, root left out
    outcome: Tensor
    landed: torch.cuda.Event
    form: Form
    turn: int  # half of the buffers that the host reads
    drafted_nodes: list[int] | None  # as in Wish
    left_depths: LeftDepths  # filled in when masks are sent
    of_text: list[bool] | None = None  # as in Wish

    def left(self, counts: list[int], levels: list[int]) -> list[int]:
        """Of so many drafts of each request, of so many levels, those that grammars leave."""
        depths = self.left_depths
        if not depths:
            return counts
        return [
            min(count, sum(depth <= level for depth in depths[i])) if i in depths else count
            for i, (count, level) in enumerate(zip(counts, levels, strict=True))
        ]
