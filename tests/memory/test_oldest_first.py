"""The order of eviction against a sorted list."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from specengine.memory.oldest_first import OldestFirst


@dataclass(eq=False)
class Thing:
    last_access: int


@settings(max_examples=100)
@given(st.integers(0, 2**32), st.integers(1, 300))
def test_the_least_recently_used_goes_first(seed: int, steps: int) -> None:
    """Times differ, for things of the same time may go in any order."""
    draw = random.Random(seed)
    known, order = [Thing(-1 - i) for i in range(20)], OldestFirst[Thing]()
    held: set[Thing] = set()
    for now in range(steps):
        act, thing = draw.randrange(5), draw.choice(known)
        if act == 0:
            thing.last_access = now
        elif act == 1:
            order.discard(thing)
            held.discard(thing)
        elif act == 2 and held:
            oldest = min(held, key=lambda one: one.last_access)
            assert order.pop() is oldest
            held.remove(oldest)
        else:
            order.add(thing)
            held.add(thing)
        assert len(order) == len(held)
    left = sorted(held, key=lambda one: one.last_access)
    assert [order.pop() for _ in left] == left
    assert order.pop() is None


def test_things_that_come_and_go_leave_nothing_behind() -> None:
    order, thing = OldestFirst[Thing](), Thing(0)
    for now in range(10_000):
        thing.last_access = now
        order.add(thing)
        order.discard(thing)
    assert len(order._heap) < 100
