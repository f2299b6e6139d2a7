"""Depths that go up and down as no clock would let them."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from specengine.engine.adaptive.choice import Decision
from specengine.engine.adaptive.steps import AdaptiveSteps


class AnyDepth(AdaptiveSteps):
    """Each round is as deep as is drawn: whatever cost and acceptance may choose some day."""

    def __init__(self, steps: Sequence[int]) -> None:
        super().__init__(steps)
        self.random = Random(0)

    def choose(self, batch_size: int) -> Decision:
        return Decision(self.random.choice(self.steps), f"batch {batch_size}: drawn", None)
