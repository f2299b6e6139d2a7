"""What rank 0 chooses by the clock, all ranks do."""

from __future__ import annotations

from collections.abc import Callable

from specengine.core.parallel import AS_RANK_0, Link, chosen_on_rank_0
from specengine.core.spec_stats import DepthChoice


def agreed(link: Link, choose: Callable[[], tuple[DepthChoice, bool]]) -> tuple[DepthChoice, bool]:
    """What to draft, and whether the drafter stays paused: what `choose` gives on rank 0, where
    alone it is called."""
    return chosen_on_rank_0(link, choose, _to_numbers, _from_numbers)


def _to_numbers(chosen: tuple[DepthChoice, bool]) -> tuple[int, ...]:
    choice, paused = chosen
    return choice.num_steps, choice.num_nodes or 0, int(paused)


def _from_numbers(num_steps: int, num_nodes: int, paused: int) -> tuple[DepthChoice, bool]:
    return DepthChoice(num_steps, AS_RANK_0, None, num_nodes or None), bool(paused)
