"""Depths that a test chooses, round by round."""

from __future__ import annotations

from collections.abc import Callable

from specengine.engine.adaptive.choice import Decision
from specengine.engine.adaptive.steps import AdaptiveSteps


class ChosenDepths(AdaptiveSteps):
    """Round n is as deep as `depth(n)`."""

    def __init__(self, depth: Callable[[int], int]) -> None:
        super().__init__([0, 1, 2, 3])
        self.depth = depth
        self.made: list[Decision] = []

    def choose(self, batch_size: int) -> Decision:
        number = len(self.made)
        self.made.append(Decision(self.depth(number), f"choice {number}", None))
        return self.made[-1]
