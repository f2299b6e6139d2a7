"""Depths where the host is slower than the device that costs were measured on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from specengine.engine.adaptive.choose import Decision
from specengine.engine.adaptive.costs import DraftShape, HostSeconds, PLAIN
from specengine.engine.adaptive.state import AdaptiveSteps
from tests.engine.adaptive_world import DEPTH, World, best_depth, measured, round_cost

EVEN = [0.6, 0.6, 0.6, 0.6]
DEVICE = {PLAIN: 1.0, DraftShape(1): 2.0, DraftShape(3): 3.0}


def of(host: HostSeconds, batch_size: int = 4) -> list[float]:
    return list(host.of(batch_size, DEVICE).values())


def teach(host: HostSeconds, shape: DraftShape, seconds: float, batch_size: int = 4) -> list[bool]:
    return [host.record(batch_size, shape, seconds) for _ in range(8)]


def test_nothing_is_known_at_first() -> None:
    host = HostSeconds()
    assert of(host) == [1.0, 2.0, 3.0]
    assert not any(host.record(4, PLAIN, 9.0) for _ in range(7))
    assert of(host) == [1.0, 2.0, 3.0], "a few rounds say nothing"
    assert host.record(4, PLAIN, 9.0)


def test_whoever_is_slower_says_what_a_round_takes() -> None:
    host = HostSeconds()
    teach(host, PLAIN, 0.5)
    teach(host, DraftShape(1), 2.5)
    assert of(host) == [1.0, 2.5, 3.0]


def test_one_after_the_other_takes_both() -> None:
    host = HostSeconds(overlaps=False)
    teach(host, PLAIN, 0.5)
    assert of(host) == [1.5, 2.5, 3.5], "drafts cost no less than none"
    teach(host, DraftShape(3), 1.0)
    assert of(host) == [1.5, 3.0, 4.0]


def test_drafts_cost_the_host_alike_however_deep() -> None:
    host = HostSeconds()
    for _ in range(4):
        host.record(4, DraftShape(1), 7.0)
        host.record(4, DraftShape(3, 8), 7.0)
    assert of(host) == [1.0, 7.0, 7.0], "of plain decoding it tells nothing"


def test_a_host_that_slows_down_is_slower_at_everything() -> None:
    """Else what ran last would look bad beside what ran when the host was quick."""
    host = HostSeconds()
    teach(host, PLAIN, 2.0)
    teach(host, DraftShape(1), 4.0)
    host.record(4, PLAIN, 2.0)
    teach(host, DraftShape(3), 10.0)
    assert of(host) == [5.0, 10.0, 10.0]
    assert not any(teach(host, PLAIN, 5.0)), "samples from before are gone"
    teach(host, PLAIN, 2.0)
    assert of(host) == [2.0, 4.0, 4.0]


def test_how_both_kinds_differ_is_learned_anew() -> None:
    """Drafts were seen first in a moment when others used the host's cores."""
    host = HostSeconds()
    teach(host, PLAIN, 2.0)
    teach(host, DraftShape(1), 8.0)
    teach(host, DraftShape(1), 2.2)
    teach(host, PLAIN, 2.0)
    assert of(host) == [2.0, 2.2, 3.0]
    teach(host, DraftShape(1), 8.8)
    assert of(host) == [8.0, 8.8, 8.8], "from then on they differ by this"


@pytest.mark.parametrize("slower", [1.5, 3.0])
def test_a_bad_moment_at_the_start_is_not_held_against_drafts(slower: float) -> None:
    world, host = HostWorld(EVEN, host=flat(9.0), noise=0.02, is_timed=False), HostSeconds()
    teach(host, DraftShape(DEPTH), 9.0 * slower, batch_size=16)
    teach(host, PLAIN, 9.0, batch_size=16)
    steps = AdaptiveSteps(range(DEPTH + 1), measured(), host=host)
    chosen = world.run(steps, 16, 4000)
    assert chosen[-400:].count(DEPTH) > 380


def test_batch_sizes_are_told_apart() -> None:
    host = HostSeconds()
    teach(host, PLAIN, 7.0, batch_size=3)
    assert of(host, 4)[0] == 7.0, "up to the next power of two"
    assert of(host, 5)[0] == of(host, 2)[0] == 1.0


def test_a_pause_is_no_round() -> None:
    host = HostSeconds()
    for seconds in (2.0, 2.0, 900.0, 2.0, 2.0, 900.0, 2.0, 2.0):
        host.record(4, PLAIN, seconds)
    assert of(host)[0] == 2.0


def test_what_differs_little_is_no_news() -> None:
    host = HostSeconds()
    assert [teach(host, PLAIN, one)[-1] for one in (2.0, 2.05, 2.2, 2.2)] == [
        True,
        False,
        True,
        False,
    ]
    assert of(host)[0] == 2.2


@dataclass
class HostWorld(World):
    """Rounds on a host that takes its time beside the device."""

    host: Callable[[int, int], float] = round_cost

    def run(self, steps: AdaptiveSteps, batch_size: int, rounds: int) -> list[int]:
        device, start = self.cost, len(self.chosen)
        self.cost = lambda batch, depth: max(device(batch, depth), self.host(batch, depth))
        try:
            for _ in range(rounds):
                self._round(steps, batch_size)
                took = self.host(batch_size, self.chosen[-1]) * self.random.gauss(1.0, 0.02)
                steps.host_took(batch_size, DraftShape(self.chosen[-1]), took)
        finally:
            self.cost = device
        return self.chosen[start:]


def flat(seconds: float) -> Callable[[int, int], float]:
    return lambda batch_size, depth: seconds


def steep(batch_size: int, depth: int) -> float:
    return 4.0 * (1 + depth)


@pytest.mark.parametrize(
    ("host", "best"),
    [
        pytest.param(flat(0.5), best_depth(EVEN, 16), id="a fast one"),
        pytest.param(flat(9.0), DEPTH, id="a slow one, whatever is drafted"),
        pytest.param(steep, 0, id="one that every draft costs dear"),
    ],
)
def test_the_best_depth_beside_a_host(host: Callable[[int, int], float], best: int) -> None:
    world = HostWorld(EVEN, host=host, noise=0.02, is_timed=False)
    steps = AdaptiveSteps(range(DEPTH + 1), measured(), host=HostSeconds())
    chosen = world.run(steps, 16, 1200)
    assert chosen[-400:].count(best) > 380
    if best == 0:
        assert world.seconds < 1.08 * world.plain_seconds, "each depth is tried, and not for long"


@pytest.mark.parametrize("learned_slow", [False, True])
def test_a_host_that_others_use_as_well(learned_slow: bool) -> None:
    """Now and then: what rounds took meanwhile is not held against a depth for good."""
    best, world = best_depth(EVEN, 16), HostWorld(EVEN, noise=0.02)
    host = HostSeconds()
    teach(host, PLAIN, 0.5, 16)
    if learned_slow:
        teach(host, DraftShape(DEPTH), 2.4, 16)
    steps = AdaptiveSteps(range(DEPTH + 1), measured(), host=host)
    for seconds in (0.9, 2.4, 0.9, 2.4, 0.9):
        world.host = flat(seconds)
        chosen = world.run(steps, 16, 300)
    assert chosen[-200:].count(best) > 180


def test_a_fast_host_changes_nothing() -> None:
    """Round for round."""
    runs = []
    for host in (None, HostSeconds()):
        world = HostWorld(EVEN, host=flat(0.5), noise=0.02, is_timed=False)
        runs.append(world.run(AdaptiveSteps(range(DEPTH + 1), measured(), host=host), 16, 600))
    assert runs[0] == runs[1]


def test_a_decision_has_one_shape() -> None:
    """Which is asked for in every round."""
    decision = Decision(3, "why", None, 8)
    assert decision.shape is decision.shape
    assert decision.shape == DraftShape(3, 8)
