"""Draft trees of fixed shapes, drawn as a sampling drafter draws them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from specengine.core.random_streams import Stream, draw
from specengine.kernels.sample.sample_rows_ref import invert_cdf


@dataclass(frozen=True)
class Shape:
    """The parents of nodes 1, 2, …"""

    name: str
    parents: tuple[int, ...]
    stops_at: int | None = None  # a chain goes no further than this token

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(len(self.parents)))

    @property
    def num_nodes(self) -> int:
        return 1 + len(self.parents)

    @cached_property
    def depths(self) -> list[int]:
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths

    def earlier_siblings(self, node: int) -> list[int]:
        return [n for n in range(1, node) if self.parents[n - 1] == self.parents[node - 1]]

    def grandparent(self, node: int) -> int | None:
        """None for the root's children."""
        parent = self.parents[node - 1]
        return self.parents[parent - 1] if parent else None


CHAIN = Shape("chain", (0, 1, 2))
CUT_CHAIN = Shape("chain that may end early", (0, 1, 2), stops_at=2)
LONG_CHAIN = Shape("chain of five", (0, 1, 2, 3, 4))
TREE = Shape("tree", (0, 0, 1, 1, 2))
FAN = Shape("three siblings", (0, 0, 0, 1))


@dataclass(frozen=True)
class Draws:
    """What was drawn for each request, and from what."""

    tokens_BN: Tensor  # int64
    probs_BNV: Tensor  # float32, before siblings were taken out


def draw_tree(
    shape: Shape,
    context_B2: Tensor,
    rows: Callable[[Tensor], Tensor],
    seeds_B: Tensor,
    output_pos_B: Tensor,
    *,
    keyed_by_node: bool = True,
) -> Draws:
    """Siblings are drawn without replacement, each node's token with a number of its own.

    context_B2: the last two tokens of each request. rows: the distributions after pairs of tokens,
    int64 [B, 2] -> float32 [B, V]. keyed_by_node: False is wrong, and there to be caught.
    """
    tokens = [context_B2[:, 1]]
    probs = [torch.zeros(0)]
    for node, parent in enumerate(shape.parents, start=1):
        before = shape.grandparent(node)
        before_B = context_B2[:, 0] if before is None else tokens[before]
        probs_BV = rows(torch.stack([before_B, tokens[parent]], dim=1))
        left_BV = probs_BV.clone()
        for sibling in shape.earlier_siblings(node):
            left_BV.scatter_(1, tokens[sibling][:, None], 0.0)
        left_BV /= left_BV.sum(-1, keepdim=True)
        position_B = output_pos_B + shape.depths[node] - 1
        lane = node if keyed_by_node else 0
        tokens.append(invert_cdf(left_BV, draw(seeds_B, position_B, Stream.DRAFT, lane)))
        probs.append(probs_BV)
    probs[0] = torch.zeros_like(probs[1])
    return Draws(torch.stack(tokens, dim=1), torch.stack(probs, dim=1))
