"""Slots change owners, and none is lost."""

from __future__ import annotations

import pytest

from specengine.core.request import Req
from specengine.core.sampling import SamplingParams
from specengine.memory.state_snapshots import StateSnapshots
from specengine.scheduler.ledger import KVLedger
from tests.scheduler.fake_engine import Setup


def opened(ledger: KVLedger, rid: str, tokens: list[int]) -> Req:
    req = Req(rid, tokens, SamplingParams())
    assert ledger.open(req, len(tokens) - 1)
    return req


def row(ledger: KVLedger, req: Req) -> list[int]:
    assert req.req_pool_idx is not None
    return [int(slot) for slot in ledger.rows.slots(req.req_pool_idx, 0, req.reserved_len)]


def test_whole_pages_are_reserved_up_to_the_end_of_the_row() -> None:
    ledger = Setup(num_slots=128, page_size=16, context_len=40).scheduler().ledger
    req = opened(ledger, "r", [1, 2, 3])
    assert ledger.reserve(req, 3)
    assert (req.reserved_len, ledger.obtainable) == (16, 112)
    assert ledger.reserve(req, 40)
    assert (req.reserved_len, ledger.obtainable) == (40, 80)
    ledger.check([req])
    ledger.release(req)
    ledger.check([])
    assert ledger.obtainable == 128


def test_what_cannot_be_reserved_changes_nothing() -> None:
    ledger = Setup(num_slots=32, page_size=16).scheduler().ledger
    req = opened(ledger, "r", [1, 2, 3])
    assert not ledger.reserve(req, 33)
    assert (req.reserved_len, ledger.obtainable) == (0, 32)


@pytest.mark.parametrize("page_size", [1, 16])
def test_slots_for_several_are_those_that_each_would_get(page_size: int) -> None:
    """The last one's are cut off by the end of its row, and the second has enough."""
    ledgers = [
        Setup(num_slots=160, page_size=page_size, context_len=40).scheduler().ledger
        for _ in range(2)
    ]
    lengths, tables = [20, 3, 40], []
    for ledger, at_once in zip(ledgers, (True, False), strict=True):
        reqs = [opened(ledger, str(i), [i, i, i]) for i in range(3)]
        assert ledger.reserve(reqs[1], 16)
        if at_once:
            assert ledger.reserve_all(reqs, lengths)
        else:
            assert all(map(ledger.reserve, reqs, lengths))
        ledger.check(reqs)
        tables.append([row(ledger, req) for req in reqs])
    assert tables[0] == tables[1]


def test_slots_for_several_are_all_there_or_none() -> None:
    ledger = Setup(num_slots=32).scheduler().ledger
    reqs = [opened(ledger, str(i), [i, i]) for i in range(2)]
    assert not ledger.reserve_all(reqs, [16, 17])
    assert [req.reserved_len for req in reqs] == [0, 0]
    assert ledger.reserve_all(reqs, [16, 16])
    assert (ledger.obtainable, ledger.reserve_all(reqs, [16, 9])) == (0, True)


@pytest.mark.parametrize(("length", "left"), [(17, 32), (16, 16), (33, 48), (48, 48), (60, 48)])
def test_trim_gives_back_whole_pages(length: int, left: int) -> None:
    ledger = Setup(num_slots=64, page_size=16).scheduler().ledger
    req = opened(ledger, "r", [1, 2, 3])
    ledger.reserve(req, 48)
    kept = row(ledger, req)[:left]
    ledger.trim(req, length)
    assert (req.reserved_len, ledger.obtainable) == (left, 64 - left)
    assert row(ledger, req) == kept
    ledger.check([req])


@pytest.mark.parametrize("page_size", [1, 4])
def test_two_requests_with_one_prompt_end_up_with_the_same_slots(page_size: int) -> None:
    ledger = Setup(num_slots=64, page_size=page_size).scheduler().ledger
    tokens = [5, 6, 7, 8, 9, 1, 2, 3, 4]
    first, second = opened(ledger, "first", tokens), opened(ledger, "second", tokens)
    for req in (first, second):
        ledger.reserve(req, 9)
        ledger.commit(req, 9)
    assert not set(row(ledger, first)) & set(row(ledger, second))
    ledger.share(first)
    ledger.share(second)
    shared = 9 // page_size * page_size
    assert first.cached_len == second.cached_len == shared
    assert row(ledger, first)[:shared] == row(ledger, second)[:shared]
    assert ledger.cache.protected_size == shared
    ledger.check([first, second])
    ledger.release(first)
    assert ledger.cache.protected_size == shared
    ledger.release(second)
    ledger.check([])
    assert (ledger.cache.protected_size, ledger.obtainable) == (0, 64)


def test_uncommitted_slots_do_not_reach_the_cache() -> None:
    ledger = Setup(num_slots=64).scheduler().ledger
    req = opened(ledger, "r", [5, 6, 7])
    ledger.reserve(req, 20)
    ledger.commit(req, 2)
    ledger.release(req)
    assert ledger.cache.match_prefix([5, 6, 7])[0].tolist() == [1, 2]
    assert ledger.allocator.available == 62


def test_the_cache_makes_room() -> None:
    ledger = Setup(num_slots=8).scheduler().ledger
    old = opened(ledger, "old", [1, 2, 3, 4, 5])
    ledger.reserve(old, 5)
    ledger.commit(old, 5)
    ledger.release(old)
    new = opened(ledger, "new", [9, 9])
    assert ledger.reserve(new, 8)
    ledger.check([new])
    assert ledger.cache.evictable_size == 0


def test_a_request_without_a_row_has_nothing_to_release() -> None:
    ledger = Setup(rows=1).scheduler().ledger
    opened(ledger, "r", [1, 2])
    waiting = Req("waiting", [3], SamplingParams())
    assert not ledger.open(waiting, 0)
    ledger.release(waiting)
    assert ledger.rows.num_free == 0


def test_snapshot_slot_of_a_prompt_that_leaves_before_it_is_shared_is_given_back() -> None:
    ledger = Setup(page_size=4).scheduler().ledger
    ledger.snapshots = StateSnapshots(10, 1, lambda _: None)
    req = opened(ledger, "r", list(range(10)))
    assert ledger.take_saves(req, 10) == [(8, 10)]
    ledger.check([req])
    ledger.release(req)
    ledger.check([])
    assert ledger.snapshots.take() == 10
