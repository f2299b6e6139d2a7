"""Choices on fixed histories, as recorded: a change of the code that means to keep them must not
move one of them. Recorded again by printing `history` of each case."""

from __future__ import annotations

from collections import Counter

import pytest

from specengine.engine.adaptive.costs import StepCosts
from specengine.engine.adaptive.estimate import HostSeconds
from specengine.engine.adaptive.state import DepthChooser
from tests.support.adaptive import (
    DEPTH,
    SIZES,
    TreeWorld,
    World,
    measured,
    measured_trees,
    tree_cost,
)


def history(batch_size: int, is_tree: bool, is_timed: bool, host: bool) -> tuple[str, str]:
    """Rounds of each shape, and the reason behind the last of 300 rounds."""
    costs: StepCosts | None = measured_trees() if is_tree else measured()
    sizes = SIZES if is_tree else {}
    kept = HostSeconds() if host else None
    costs = None if is_timed else costs
    steps = DepthChooser(range(DEPTH + 1), costs, sizes=sizes, host=kept, pads=host)
    if is_tree:
        trees = TreeWorld([0.55, 0.2, 0.1], tree_cost, noise=0.02, is_timed=is_timed)
        counts = Counter(map(str, trees.run(steps, batch_size, 300)))
    else:
        world = World([0.8, 0.7, 0.4, 0.3], noise=0.02, is_timed=is_timed)
        world.host = (lambda _, depth: 1.2 + 0.1 * depth) if host else None
        counts = Counter(f"K={depth}" for depth in world.run(steps, batch_size, 300))
    assert steps.current is not None
    shapes = ", ".join(f"{count} {shape}" for shape, count in sorted(counts.items()))
    return shapes, steps.current.reason


CASES = [
    (batch_size, is_tree, is_timed, host)
    for batch_size in (1, 16)
    for is_tree in (False, True)
    for is_timed in (False, True)
    for host in (False, True)
    if not (host and (is_tree or is_timed))
]
RECORDED = [
    (
        "300 K=4",
        "batch 1: K=4, 2.18x of none; acceptance 0.81 0.67 0.39 0.29",
    ),
    (
        "300 K=4",
        "batch 1: K=4, 1.68x of none; acceptance 0.80 0.71 0.44 0.34",
    ),
    (
        "8 K=0, 1 K=3, 291 K=4",
        "batch 1: K=4, 2.17x of none; acceptance 0.81 0.68 0.39 0.30",
    ),
    (
        "255 K=3, 45 K=4",
        "batch 1: K=3, 2.54x of none; acceptance 0.86 0.78 0.60 0.24",
    ),
    (
        "8 K=0, 1 K=2, 269 K=3, 20 K=4, 1 K=4 with 5 nodes, 1 K=4 with 8 nodes",
        "batch 1: K=3, 2.54x of none; acceptance 0.86 0.78 0.61 0.17",
    ),
    (
        "294 K=3, 6 K=4",
        "batch 16: K=3, 2.25x of none; acceptance 0.76 0.75 0.45 0.40",
    ),
    (
        "13 K=3, 287 K=4",
        "batch 16: K=4, 1.64x of none; acceptance 0.79 0.72 0.39 0.27",
    ),
    (
        "8 K=0, 23 K=2, 266 K=3, 3 K=4",
        "batch 16: K=3, 2.21x of none; acceptance 0.78 0.69 0.42 0.41",
    ),
    (
        "16 K=1, 268 K=2 with 4 nodes, 16 K=4 with 5 nodes",
        "batch 16: K=2 with 4 nodes, 1.81x of none; acceptance 0.72 0.38 0.01 0.01",
    ),
    (
        "4 K=0, 293 K=1, 1 K=2, 2 K=4",
        "batch 16: K=1, 1.83x of none; acceptance 0.90 0.77 0.37 0.21",
    ),
]


@pytest.mark.parametrize(("case", "recorded"), [*zip(CASES, RECORDED, strict=True)], ids=str)
def test_choices_on_a_fixed_history_are_as_recorded(
    case: tuple[int, bool, bool, bool], recorded: tuple[str, str]
) -> None:
    assert history(*case) == recorded
