"""What rank 0 chooses, as another rank learns of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from specengine.core.spec_stats import DepthChoice
from specengine.engine.adaptive.agree import agreed
from tests.support.pretended_ranks import PretendedRanks


def never() -> Any:
    raise AssertionError("chosen by a rank that is not the first")


@pytest.mark.parametrize("num_nodes", [9, None])
@pytest.mark.parametrize("is_paused", [False, True])
def test_other_rank_drafts_the_depth_and_the_nodes_that_rank_0_has_chosen(
    num_nodes: int | None, is_paused: bool
) -> None:
    choice, told = DepthChoice(3, "faster", 1.5, num_nodes), list[tuple[int, ...]]()

    def lead(make: Any) -> tuple[int, ...]:
        told.append(make())
        return told[0]

    first: Any = SimpleNamespace(communicator=PretendedRanks(2, 0), decide=lead)
    other: Any = SimpleNamespace(communicator=PretendedRanks(2, 1), decide=lambda _: told[0])
    assert agreed(first, lambda: (choice, is_paused)) == (choice, is_paused)
    found, stays_paused = agreed(other, never)
    assert (found.shape, stays_paused) == (choice.shape, is_paused)
