"""What rank 0 chooses by the clock, all ranks do."""

from __future__ import annotations

from collections.abc import Callable

from specengine.core.parallel import Link
from specengine.core.spec_stats import DepthChoice

_TOLD = "as rank 0 has chosen"


def agreed(link: Link, choose: Callable[[], tuple[DepthChoice, bool]]) -> tuple[DepthChoice, bool]:
    """What to draft, and whether the drafter stays paused: what `choose` gives on rank 0, where
    alone it is called."""
    if link.communicator.size == 1:
        return choose()
    made: list[tuple[DepthChoice, bool]] = []

    def numbers() -> tuple[int, ...]:
        made.append(choose())
        (choice, paused) = made[0]
        return choice.num_steps, choice.num_nodes or 0, int(paused)

    num_steps, num_nodes, paused = link.decide(numbers)
    if made:
        return made[0]
    return DepthChoice(num_steps, _TOLD, None, num_nodes or None), bool(paused)
