from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from specengine.core.errors import InvariantError
from specengine.memory.radix_cache import RadixCache, RadixNode
from specengine.memory.state_snapshots import StateSnapshots


class World:
    """A cache of pages of 2, slots 10 and on for snapshots."""

    def __init__(self, count: int = 3) -> None:
        self.copied: list[tuple[int, int]] = []
        self.cache = RadixCache(page_size=2)
        self.snapshots = StateSnapshots(10, count, self.copied.extend)
        self.cache.follower = self.snapshots

    def remember(self, tokens: Sequence[int], *places: int) -> RadixNode:
        """With snapshots behind so many of the tokens."""
        known, _ = self.cache.match_prefix(tokens)
        slots = np.arange(1, len(tokens) + 1, dtype=np.int32)
        _, node = self.cache.append(self.cache.root, tokens, slots)
        for place in places:
            slot = self.snapshots.take()
            assert slot is not None
            self.snapshots.attach(node, len(tokens), place, slot)
        assert len(known) <= len(tokens)
        return node

    def longest(self, tokens: Sequence[int]) -> int:
        slots, node = self.cache.match_prefix(tokens)
        return self.snapshots.longest(node, len(slots))[0]


def test_prefix_is_cut_to_the_last_snapshot() -> None:
    world = World()
    world.remember([1, 2, 3, 4, 5, 6, 7, 8], 2, 6)
    assert world.longest([1, 2, 3, 4, 5, 6, 7, 8]) == 6
    assert world.longest([1, 2, 3, 4, 9, 9]) == 2
    assert world.longest([1, 9]) == 0
    world.snapshots.check(0)


def test_snapshots_stay_where_they_were_when_nodes_are_cut() -> None:
    world = World()
    world.remember([1, 2, 3, 4, 5, 6], 2, 4, 6)
    world.remember([1, 2, 3, 4, 7, 8])
    assert world.longest([1, 2, 3, 4, 7, 8]) == 4
    assert world.longest([1, 2, 3, 4, 5, 6]) == 6
    assert world.longest([1, 2]) == 2


def test_evicted_node_gives_its_slots_back() -> None:
    world = World()
    world.remember([1, 2, 3, 4], 2, 4)
    world.remember([5, 6], 2)
    assert world.snapshots.take() is not None  # the oldest of all
    world.snapshots.check(1)
    world.cache.evict(100)
    assert world.snapshots.num_kept == 0
    world.snapshots.check(1)
    with pytest.raises(InvariantError, match=r"0 kept \+ 2 free \+ 0 pending != 3"):
        world.snapshots.check(0)


def test_least_recently_used_goes_first() -> None:
    world = World(count=2)
    world.remember([1, 2], 2)
    world.remember([3, 4], 2)
    _, node = world.cache.match_prefix([1, 2])
    length, slot = world.snapshots.longest(node, 2)
    assert slot is not None
    world.snapshots.restore(slot, row=5)
    world.snapshots.flush()
    assert (length, world.copied) == (2, [(slot, 5)])
    world.remember([5, 6], 2)
    assert [world.longest(one) for one in ([1, 2], [3, 4], [5, 6])] == [2, 0, 2]
    assert world.snapshots.num_evicted == 1


def test_second_snapshot_of_a_prefix_is_given_back() -> None:
    world = World()
    world.remember([1, 2], 2)
    _, node = world.cache.match_prefix([1, 2])
    first = world.snapshots.longest(node, 2)
    world.remember([1, 2], 2)
    assert world.snapshots.num_kept == 1
    assert world.snapshots.longest(node, 2) == first
    world.snapshots.check(0)


def test_none_can_be_taken_where_requests_have_them_all() -> None:
    world = World(count=1)
    assert world.snapshots.take() == 10
    assert world.snapshots.take() is None
    assert World(count=0).snapshots.take() is None
