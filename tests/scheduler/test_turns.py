"""Calls take turns, however many choices each has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from specengine.core.request import Req, ReqState
from specengine.core.sampling import SamplingParams
from specengine.scheduler.kept_memory import Kept
from specengine.scheduler.queues import RequestQueues
from specengine.scheduler.split_prompts import waiting_tokens
from tests.scheduler.fake_engine import FakeEngine, Setup, expected_output
from tests.scheduler.test_scheduler import add, prompt


def call(engine: FakeEngine, owner: str, count: int, size: int = 4, **sampling: Any) -> list[Req]:
    """The choices of one call, each of another prompt."""
    params = SamplingParams(**{"ignore_eos": True, "max_tokens": 60} | sampling)
    return [
        engine.add(f"{owner}#{number}", prompt(size, first=1 + number % 8), params, owner=owner)
        for number in range(count)
    ]


def steps(engine: FakeEngine, count: int) -> None:
    for _ in range(count):
        engine.step()


def check_all(engine: FakeEngine, reqs: Sequence[Req]) -> None:
    engine.run()
    for req in reqs:
        assert req.output_ids == expected_output(req, engine.setup.context_len)


def later(engine: FakeEngine, count: int = 1000) -> None:
    """So many calls come and go: the turn of all choices that wait has come."""
    for number in range(count):
        add(engine, f"gone {number}", prompt(4))
        engine.scheduler.abort(f"gone {number}")


def num_live(engine: FakeEngine, owner: str) -> int:
    return sum(req.owner == owner for req in engine.scheduler.queues.live)


def test_first_choice_of_each_call_goes_before_all_second_ones() -> None:
    engine = FakeEngine(Setup(rows=2))
    call(engine, "a", 40)
    call(engine, "b", 40)
    add(engine, "c", prompt(4))
    queues = engine.scheduler.queues
    assert [req.rid for req in queues.in_turn(5)] == ["a#0", "b#0", "c", "a#1", "a#2"]
    assert [req.rid for req in queues.in_turn(2)] == ["a#0", "b#0"]


def test_first_choices_do_not_go_before_a_lower_number_of_priority() -> None:
    engine = FakeEngine(Setup(rows=2))
    call(engine, "urgent", 3, priority=-1)
    call(engine, "later", 2)
    order = [req.rid for req in engine.scheduler.queues.in_turn(9)]
    assert order == ["urgent#0", "urgent#1", "urgent#2", "later#0", "later#1"]


@pytest.mark.parametrize(
    ("setup", "owners", "size"),
    [
        (Setup(num_slots=4096, rows=8), "abcde", 4),
        (Setup(num_slots=300, rows=64), "abcde", 4),
        (Setup(num_slots=300, rows=64, chunk=32), "ab", 70),  # prompts are still being read
        (Setup(num_slots=300, rows=64, chunk=32, disable_cache=True), "ab", 70),
    ],
    ids=["rows", "memory", "prompts", "prompts without a cache"],
)
def test_late_call_is_served_at_once_beside_several_of_many_choices(
    setup: Setup, owners: str, size: int
) -> None:
    engine = FakeEngine(setup)
    many = [req for owner in owners for req in call(engine, owner, 40, size, max_tokens=20)]
    steps(engine, 20)
    late = [add(engine, f"late {n}", prompt(4, first=7 + n), max_tokens=1) for n in range(3)]
    steps(engine, 4)
    assert all(req.is_finished for req in late)
    assert sum(not req.is_finished for req in many) > len(many) // 2
    check_all(engine, many)


def test_late_calls_take_rows_from_the_call_that_has_most() -> None:
    engine = FakeEngine(Setup(num_slots=4096, rows=8))
    call(engine, "few", 3)
    call(engine, "many", 40)
    steps(engine, 3)
    assert (num_live(engine, "few"), num_live(engine, "many")) == (3, 5)
    for number in range(4):
        add(engine, f"late {number}", prompt(4), max_tokens=60)
        steps(engine, 2)
    assert (num_live(engine, "few"), num_live(engine, "many")) == (2, 2)


def test_calls_do_not_take_rows_from_each_other_again_and_again() -> None:
    engine = FakeEngine(Setup(num_slots=4096, rows=8))
    many = call(engine, "many", 40)
    steps(engine, 3)
    late = [add(engine, f"late {number}", prompt(4), max_tokens=40) for number in range(20)]
    steps(engine, 20)
    assert engine.scheduler.num_retractions == 7
    assert not any(req.num_retractions for req in [many[0], *late])
    assert num_live(engine, "many") == 1
    check_all(engine, [*many, *late])


def test_call_is_admitted_beside_choices_that_may_yet_need_all_memory() -> None:
    """What they are expected to need is not kept for those that give way to it."""
    engine = FakeEngine(Setup(num_slots=400, rows=32, context_len=300))
    many = call(engine, "many", 12, max_tokens=200)
    steps(engine, 6)
    later(engine)
    late = add(engine, "late", prompt(20, first=9), max_tokens=150)
    steps(engine, 3)
    assert late.state is ReqState.RUNNING
    check_all(engine, [*many, late])


def test_where_memory_is_short_the_call_with_most_of_it_gives_way() -> None:
    """Not the one that came last."""
    engine = FakeEngine(Setup(num_slots=120, rows=32, disable_cache=True))
    many = call(engine, "many", 4, max_tokens=60)
    later(engine)
    late = add(engine, "late", prompt(4, first=9), max_tokens=30)
    check_all(engine, [*many, late])
    assert engine.scheduler.num_retractions
    assert not late.num_retractions
    assert not many[0].num_retractions


def test_prompt_that_choices_share_counts_once_where_memory_is_short() -> None:
    engine = FakeEngine(Setup(num_slots=200, rows=32))
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    same = [engine.add(f"same#{n}", prompt(30), params, owner="same") for n in range(3)]
    steps(engine, 6)
    other = call(engine, "other", 2, size=34, max_tokens=60)
    steps(engine, 8)
    assert all(req.state is ReqState.RUNNING for req in [*same, *other])
    assert engine.scheduler.queues.first_to_leave() is other[-1]


def test_request_that_is_put_back_goes_before_those_of_its_rank() -> None:
    """A later choice of a call may have the place of a call that came after it."""
    queues = RequestQueues()
    first, second, later = (
        Req(rid, [1], SamplingParams(), owner=rid[0]) for rid in ("a1", "a2", "b")
    )
    for req in (first, second, later):
        queues.add(req)
    later.place = second.place
    queues.start_prefilling(second)
    queues.remove(second)
    queues.put_back(second)
    assert [*queues.waiting] == [first, second, later]


def test_choice_that_a_split_prefill_runs_gives_way_to_no_other_call() -> None:
    queues = RequestQueues()
    running, under_way, first = (
        Req(r, [1], SamplingParams(), owner=r[0]) for r in ("a1", "a2", "b")
    )
    for req in (running, under_way, first):
        queues.add(req)
    for req in (running, under_way):
        queues.start_prefilling(req)
    assert queues.overtaken(first) is under_way
    queues.split[under_way] = object()
    assert queues.overtaken(first) is running


def test_prompt_that_leaves_a_split_prefill_is_none_of_it() -> None:
    queues, batch = RequestQueues(), object()
    gone, stays = (Req(rid, [1, 2, 3], SamplingParams()) for rid in ("gone", "stays"))
    for req in (gone, stays):
        queues.add(req)
        queues.start_prefilling(req)
    queues.split |= {gone: batch, stays: batch}
    queues.remove(gone)
    assert queues.split == {stays: batch}
    assert waiting_tokens(queues) == 0


def test_memory_of_a_choice_that_gave_way_is_not_kept_for_it() -> None:
    """The other call begins in the same forward."""
    engine = FakeEngine(Setup(num_slots=90, chunk=-1))
    _, second = call(engine, "many", 2, size=20, max_tokens=40)
    steps(engine, 1)
    later(engine)
    other = add(engine, "other", prompt(26, first=9), max_tokens=20)
    while not second.num_retractions:
        steps(engine, 1)
    assert other.state is ReqState.RUNNING


def test_kept_memory_counts_the_first_of_each_owner() -> None:
    kept = Kept()
    reqs = [Req(f"r{n}", [1], SamplingParams(), owner="ab"[n % 2], place=5 - n) for n in range(4)]
    for req, slots in zip(reqs, [1, 10, 100, 1000], strict=True):
        kept.add(req, slots)
    assert kept.of_firsts() == 1100
    assert kept.before(Req("late", [1], SamplingParams(), place=9)) == 1111
    assert kept.before(Req("early", [1], SamplingParams(), place=3)) == 1100
    kept.remove(reqs[1])
    assert kept.before(Req("late", [1], SamplingParams(), place=9)) == 1101
