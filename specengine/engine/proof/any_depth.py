"""Depths, and sizes of trees, that go up and down as no clock would let them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from specengine.core.spec_stats import DepthChoice
from specengine.engine.adaptive.state import DepthChooser


class AnyDepth(DepthChooser):
    """Each round is as deep as is drawn, and of as many nodes: whatever cost and acceptance may
    choose some day."""

    def __init__(self, steps: Sequence[int], sizes: Mapping[int, Sequence[int]]) -> None:
        super().__init__(steps, sizes=sizes)
        self.random = Random(0)

    def choose(self, batch_size: int) -> DepthChoice:
        shape = self.random.choice(self.shapes)
        return DepthChoice(shape.num_steps, f"batch {batch_size}: drawn", None, shape.num_nodes)
