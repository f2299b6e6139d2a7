"""Depths that a test chooses, round by round."""

from __future__ import annotations

from collections.abc import Callable

from specengine.core.spec_stats import DepthChoice
from specengine.engine.adaptive.state import DepthChooser


class ChosenDepths(DepthChooser):
    """Round n is as deep as `depth(n)`."""

    def __init__(self, depth: Callable[[int], int]) -> None:
        super().__init__([0, 1, 2, 3])
        self.depth = depth
        self.made: list[DepthChoice] = []

    def choose(self, batch_size: int) -> DepthChoice:
        number = len(self.made)
        self.made.append(DepthChoice(self.depth(number), f"choice {number}", None))
        return self.made[-1]
