"""The prefix cache against a plain dictionary of prefixes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specengine.memory.radix_cache import RadixCache, RadixNode

Prefix = tuple[int, ...]


def insert(cache: RadixCache, tokens: list[int], slots: Any) -> int:
    """Insert a whole sequence. Returns how many leading tokens were known."""
    return len(cache.append(cache.root, tokens, slots)[0])


class Model:
    """Every cached prefix of whole pages, with the slots of its last page."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.slots: dict[Prefix, list[int]] = {}

    def prefixes(self, tokens: list[int]) -> list[Prefix]:
        ends = range(self.page_size, len(tokens) + 1, self.page_size)
        return [tuple(tokens[:end]) for end in ends]

    def match(self, tokens: list[int]) -> list[int]:
        found: list[int] = []
        for prefix in self.prefixes(tokens):
            if prefix not in self.slots:
                break
            found += self.slots[prefix]
        return found

    def insert(self, tokens: list[int], slots: list[int]) -> int:
        known = len(self.match(tokens))
        for prefix in self.prefixes(tokens):
            page = slots[len(prefix) - self.page_size : len(prefix)]
            self.slots.setdefault(prefix, page)
        return known

    def forget(self, gone: list[int]) -> None:
        lost = set(gone)
        self.slots = {p: s for p, s in self.slots.items() if not lost & set(s)}

    @property
    def size(self) -> int:
        return len(self.slots) * self.page_size


class Session:
    def __init__(self, page_size: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.page_size = page_size
        self.cache = RadixCache(page_size)
        self.model = Model(page_size)
        self.locks: list[tuple[list[int], RadixNode]] = []
        self.next_slot = page_size

    def tokens(self) -> list[int]:
        return [self.random.randrange(2) for _ in range(self.random.randint(0, 12))]

    def insert(self) -> None:
        tokens = self.tokens()
        slots = list(range(self.next_slot, self.next_slot + len(tokens)))
        self.next_slot += len(tokens) + self.page_size
        known = insert(self.cache, tokens, np.array(slots, dtype=np.int32))
        assert known == self.model.insert(tokens, slots)

    def match(self) -> None:
        tokens = self.tokens()
        slots, node = self.cache.match_prefix(tokens)
        assert slots.tolist() == self.model.match(tokens)
        if self.random.random() < 0.5:
            self.cache.inc_lock_ref(node)
            self.locks.append((tokens[: len(slots)], node))

    def append(self) -> None:
        """As a request does, from the node that it holds on."""
        if not self.locks:
            return
        place = self.random.randrange(len(self.locks))
        (held, node), more = self.locks[place], self.tokens()
        slots = list(range(self.next_slot, self.next_slot + len(more)))
        self.next_slot += len(more) + self.page_size
        known, end = self.cache.append(node, more, np.array(slots, dtype=np.int32))
        whole = held + more[: len(more) // self.page_size * self.page_size]
        assert known.tolist() == self.model.match(whole)[len(held) :]
        self.model.insert(whole, [0] * len(held) + slots)
        self.cache.inc_lock_ref(end, locked=node)
        self.locks[place] = whole, end

    def unlock(self) -> None:
        if self.locks:
            _, node = self.locks.pop(self.random.randrange(len(self.locks)))
            self.cache.dec_lock_ref(node)

    def evict(self) -> None:
        wanted = self.random.randint(0, 12)
        evictable = self.cache.evictable_size
        gone = self.cache.evict(wanted).tolist()
        assert len(set(gone)) == len(gone) >= min(wanted, evictable)
        before = self.model.size
        self.model.forget(gone)
        assert self.model.size == before - len(gone)

    def check(self) -> None:
        locked = {p for tokens, _ in self.locks for p in self.model.prefixes(tokens)}
        assert locked <= self.model.slots.keys()
        assert self.cache.protected_size == len(locked) * self.page_size
        assert self.cache.evictable_size == self.model.size - self.cache.protected_size
        for prefix in self.model.slots:
            assert len(self.model.match(list(prefix))) == len(prefix), "a prefix lost its beginning"


@settings(max_examples=150)
@given(st.sampled_from([1, 2, 3]), st.integers(0, 2**32), st.integers(1, 60))
def test_equals_a_dictionary(page_size: int, seed: int, steps: int) -> None:
    session = Session(page_size, seed)
    actions = [session.insert, session.insert, session.match, session.unlock, session.evict]
    actions += [session.append, session.append]
    for _ in range(steps):
        session.random.choice(actions)()
        session.check()
    while session.locks:
        session.unlock()
    session.cache.evict(session.cache.evictable_size)
    assert session.cache.evictable_size == session.cache.protected_size == 0
    assert list(session.cache.nodes()) == []


def filled(*sequences: list[int]) -> RadixCache:
    """Token t at depth d has slot 100 * d + t."""
    cache = RadixCache(page_size=1)
    for tokens in sequences:
        slots = [100 * depth + token for depth, token in enumerate(tokens, start=1)]
        insert(cache, tokens, np.array(slots, dtype=np.int32))
    return cache


def test_least_recently_used_leaf_goes_first() -> None:
    """
    1-2-3    used again
       \\-4   oldest
    5-6
    """
    cache = filled([1, 2, 4], [1, 2, 3], [5, 6])
    cache.match_prefix([1, 2, 3])
    assert cache.evict(1).tolist() == [304]
    assert cache.evict(1).tolist() == [105, 206]
    assert cache.evict(1).tolist() == [303]
    assert cache.evict(9).tolist() == [101, 202]
    assert cache.evict(1).tolist() == []


def test_a_lock_keeps_its_path_and_nothing_else() -> None:
    cache = filled([1, 2, 3, 4])
    _, node = cache.match_prefix([1, 2])
    cache.inc_lock_ref(node)
    assert (cache.protected_size, cache.evictable_size) == (2, 2)
    assert cache.evict(4).tolist() == [303, 404]
    cache.dec_lock_ref(node)
    assert cache.evict(4).tolist() == [101, 202]


def test_what_is_appended_makes_the_whole_path_young() -> None:
    cache = filled([1, 2], [5, 6])
    _, node = cache.match_prefix([1, 2])
    cache.inc_lock_ref(node)
    cache.match_prefix([5, 6])
    known, end = cache.append(node, [3], np.array([303], dtype=np.int32))
    assert (known.tolist(), end.slots.tolist()) == ([], [303])
    cache.dec_lock_ref(node)
    assert cache.evict(1).tolist() == [105, 206]
    assert cache.evict(3).tolist() == [303, 101, 202]


def test_a_locked_node_that_is_split_stays_locked() -> None:
    cache = filled([1, 2, 3, 4])
    _, node = cache.match_prefix([1, 2, 3, 4])
    cache.inc_lock_ref(node)
    insert(cache, [1, 2, 9], np.array([1, 2, 309], dtype=np.int32))
    assert (cache.protected_size, cache.evictable_size) == (4, 1)
    cache.dec_lock_ref(node)
    assert (cache.protected_size, cache.evictable_size) == (0, 5)


def test_an_incomplete_page_is_not_kept() -> None:
    cache = RadixCache(page_size=4)
    assert insert(cache, list(range(7)), np.arange(4, 11, dtype=np.int32)) == 0
    assert cache.match_prefix(list(range(7)))[0].tolist() == [4, 5, 6, 7]
    assert cache.match_prefix([0, 1, 2])[0].tolist() == []


def test_the_cache_keeps_its_own_copy() -> None:
    cache = RadixCache(page_size=1)
    tokens, slots = np.array([1, 2]), np.array([5, 6], dtype=np.int32)
    insert(cache, tokens, slots)
    tokens[:], slots[:] = 9, 9
    assert cache.match_prefix([1, 2])[0].tolist() == [5, 6]


def test_disabled_remembers_nothing() -> None:
    cache = RadixCache(page_size=1, disable=True)
    assert insert(cache, [1, 2], np.array([5, 6], dtype=np.int32)) == 0
    slots, node = cache.match_prefix([1, 2])
    cache.inc_lock_ref(node)
    cache.dec_lock_ref(node)
    assert len(slots) == cache.evictable_size == cache.protected_size == 0


def test_reset_forgets() -> None:
    cache = filled([1, 2, 3])
    cache.inc_lock_ref(cache.match_prefix([1])[1])
    cache.reset()
    assert cache.match_prefix([1, 2, 3])[0].tolist() == []
    assert cache.evictable_size == cache.protected_size == 0


@pytest.mark.parametrize("page_size", [1, 16])
def test_deep_trees_need_no_recursion(page_size: int) -> None:
    cache = RadixCache(page_size)
    tokens = np.arange(1200 * page_size)
    slots = np.arange(page_size, len(tokens) + page_size, dtype=np.int32)
    insert(cache, tokens, slots)
    for end in range(len(tokens) - page_size, 0, -page_size):
        assert len(cache.match_prefix(tokens[:end])[0]) == end
    assert len(list(cache.nodes())) == 1200
    found, node = cache.match_prefix(tokens)
    assert np.array_equal(found, slots)
    cache.inc_lock_ref(node)
    cache.dec_lock_ref(node)
    assert len(cache.evict(len(tokens))) == len(tokens)


def test_with_a_lookahead_slots_are_found_where_the_next_tokens_agree_too() -> None:
    cache = RadixCache(page_size=1, lookahead=2)
    assert insert(cache, [1, 2, 3, 4, 5], np.arange(1, 4)) == 0
    for tokens, slots in (
        ([1, 2, 3, 4, 5, 6], [1, 2, 3]),
        ([1, 2, 3, 4, 9], [1, 2]),
        ([1, 2, 3, 9, 9], [1]),
        ([1, 2, 3], [1]),
        ([1, 2], []),
        ([], []),
    ):
        assert cache.match_prefix(tokens)[0].tolist() == slots
    assert insert(cache, [1, 2, 3, 9, 9], np.arange(11, 14)) == 1
    assert cache.match_prefix([1, 2, 3, 9, 9])[0].tolist() == [1, 12, 13]
    assert cache.match_prefix([1, 2, 3, 4, 5])[0].tolist() == [1, 2, 3]
    assert sorted(cache.evict(5).tolist()) == [1, 2, 3, 12, 13]


def test_with_a_lookahead_pages_are_whole() -> None:
    cache = RadixCache(page_size=2, lookahead=1)
    insert(cache, [1, 2, 3, 4, 5, 6], np.arange(4, 9))
    assert cache.match_prefix([1, 2, 3, 4, 5])[0].tolist() == [4, 5, 6, 7]
    assert cache.match_prefix([1, 2, 3, 4, 9])[0].tolist() == [4, 5]
    assert cache.match_prefix([1, 2, 3, 4])[0].tolist() == [4, 5]
