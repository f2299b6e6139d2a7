"""How many prompt tokens a forward takes, by the time that forwards took."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

# Prompt tokens that a forward may always take, and those of the first one. Fewer would hardly be
# faster: weights are read once a forward.
LEAST, FIRST = 64, 128


@dataclass
class PromptPace:
    """Keeps forwards of prompts to about `seconds`, so that a request which comes amid one is soon
    served, however slow the machine is and whatever else it does.

    A forward that took longer makes the next ones smaller at once. One that had as many tokens as
    it might, and took less, makes the next one up to twice as large.

    seconds: none are too many by default. clock: seconds, from anywhere.
    """

    seconds: float = math.inf
    clock: Callable[[], float] = monotonic
    _size: int = field(init=False)
    _began: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self._size = sys.maxsize if self.seconds == math.inf else FIRST

    def begin(self, most: int) -> int:
        """A forward begins: the prompt tokens that it may take, `most` at most."""
        self._began = self.clock()
        return min(most, self._size)

    def end(self, num_tokens: int) -> None:
        """It has run, with so many."""
        taken = max(self.clock() - self._began, 1e-6)
        if self.seconds == math.inf or num_tokens < LEAST:
            return
        fitting = int(num_tokens * min(self.seconds / taken, 2.0))
        if taken > self.seconds:
            self._size = max(LEAST, min(self._size, fitting))
        elif num_tokens >= self._size:
            self._size = fitting
