"""Requests of a lower number of priority go before others, and choices of one call take turns."""

from __future__ import annotations

from typing import Any

import pytest

from specengine.core.errors import RequestError
from specengine.core.request import Req, ReqState
from specengine.core.sampling import SamplingParams
from specengine.scheduler.admission import MOST_PASSED
from specengine.scheduler.queues import TURN
from tests.scheduler.fake_engine import FakeEngine, Setup, expected_output
from tests.scheduler.test_scheduler import add, prompt


def waiting(engine: FakeEngine) -> list[str]:
    return [req.rid for req in engine.scheduler.queues.waiting]


def test_the_queue_goes_by_priority_then_by_arrival() -> None:
    engine = FakeEngine(Setup(rows=1))
    for rid, priority in [("a", 0), ("b", 5), ("c", -1), ("d", 0), ("e", -1), ("f", 5)]:
        add(engine, rid, prompt(4), priority=priority)
    assert waiting(engine) == ["c", "e", "a", "d", "b", "f"]


def test_a_later_request_of_lower_number_is_served_first() -> None:
    engine = FakeEngine(Setup(rows=1, disable_cache=True))
    reqs = [add(engine, rid, prompt(4), priority=p) for rid, p in [("a", 1), ("b", 1), ("c", 0)]]
    engine.run()
    finished = sorted(reqs, key=lambda req: req.finish_time or 0.0)
    assert [req.rid for req in finished] == ["c", "a", "b"]


def test_running_requests_are_not_interrupted() -> None:
    engine = FakeEngine(Setup(rows=1))
    first = add(engine, "first", prompt(4), priority=9)
    engine.step()
    add(engine, "urgent", prompt(4), priority=-9)
    while not first.is_finished:
        batch = engine.step()
        assert batch is not None
        assert [req.rid for req in batch.reqs] == ["first"]
    assert engine.scheduler.num_retractions == 0


def pressed(old: int, new: int) -> tuple[FakeEngine, list[Req]]:
    """Two requests that do not fit beside each other, up to the first retraction."""
    engine = FakeEngine(Setup(num_slots=48))
    reqs = [add(engine, "old", prompt(8), max_tokens=30, priority=old)]
    engine.step()
    reqs.append(add(engine, "new", prompt(8, first=9), max_tokens=30, priority=new))
    while not engine.scheduler.num_retractions:
        engine.step()
    return engine, reqs


@pytest.mark.parametrize(("old", "new", "gone"), [(0, 0, 1), (0, 1, 1), (1, 0, 0)])
def test_where_memory_is_short_the_higher_number_goes(old: int, new: int, gone: int) -> None:
    engine, reqs = pressed(old, new)
    assert [req.num_retractions for req in reqs] == [1 - gone, gone]
    engine.run()
    for req in reqs:
        assert req.output_ids == expected_output(req, engine.setup.context_len)


def test_a_retracted_request_goes_before_its_own_priority_alone() -> None:
    engine, (_, new) = pressed(old=0, new=1)
    assert waiting(engine) == ["new"]
    engine.scheduler.queues.waiting.remove(new)
    for rid, priority in [("urgent", 0), ("same", 1)]:
        engine.scheduler.queues.add(Req(rid, [1], SamplingParams(priority=priority)))
    engine.scheduler.queues.put_back(new)
    assert waiting(engine) == ["urgent", "new", "same"]


@pytest.mark.parametrize("priority", [1.5, True, 2**40, None])
def test_priorities_are_whole_numbers(priority: object) -> None:
    with pytest.raises(RequestError, match="priority"):
        SamplingParams(priority=priority)  # type: ignore[arg-type]


def choices(engine: FakeEngine, owner: str, count: int, **sampling: Any) -> list[Req]:
    """Added as one call's."""
    made = []
    for number in range(count):
        params = SamplingParams(**sampling)
        req = Req(f"{owner}#{number}", prompt(4, first=number % 5), params, owner=owner)
        engine.scheduler.add(req)
        made.append(req)
    return made


def test_a_later_call_goes_before_most_choices_of_one_call() -> None:
    engine = FakeEngine(Setup(rows=1))
    many = choices(engine, "many", 100)
    add(engine, "late", prompt(4))
    before = waiting(engine).index("late")
    assert before == 100 // (TURN + 1) + 1
    assert waiting(engine)[:3] == [req.rid for req in many[:3]]


def test_choices_are_not_overtaken_for_ever() -> None:
    engine = FakeEngine(Setup(rows=1))
    choices(engine, "many", 3)
    for number in range(100):
        add(engine, str(number), prompt(4))
    assert waiting(engine).index("many#2") == 2 + 2 * TURN - 1


def test_owner_is_forgotten_with_its_last_choice() -> None:
    engine = FakeEngine(Setup(rows=8))
    choices(engine, "many", 20, max_tokens=2)
    engine.scheduler.abort("many#3")
    assert engine.scheduler.queues.owners == {"many": 19}
    engine.run()
    assert not engine.scheduler.queues.owners


@pytest.mark.parametrize("setup", [Setup(num_slots=512, rows=64), Setup(num_slots=2048, rows=8)])
def test_late_call_is_served_while_choices_hold_all_memory_or_rows(setup: Setup) -> None:
    engine = FakeEngine(setup)
    many = choices(engine, "many", 40, max_tokens=60, ignore_eos=True)
    while not any(len(req.output_ids) > 30 for req in many):
        engine.step()
    late = add(engine, "late", prompt(4, first=7), max_tokens=1)
    for _ in range(4):
        engine.step()
    assert late.is_finished
    assert not any(req.is_finished for req in many)
    assert sum(req.num_retractions for req in many) <= 2
    engine.run()
    for req in many:
        assert req.output_ids == expected_output(req, engine.setup.context_len)


def test_first_choices_of_a_call_are_not_interrupted() -> None:
    engine = FakeEngine(Setup(rows=4))
    first = choices(engine, "first", 1, max_tokens=40, ignore_eos=True)
    first += choices(engine, "second", 1, max_tokens=40, ignore_eos=True)
    first += [add(engine, rid, prompt(4), max_tokens=40, ignore_eos=True) for rid in "ab"]
    engine.step()
    add(engine, "late", prompt(4), max_tokens=1)
    engine.run()
    assert not any(req.num_retractions for req in first)


def test_small_request_does_not_wait_for_memory_that_a_larger_one_waits_for() -> None:
    engine = FakeEngine(Setup(num_slots=1500, rows=64, chunk=64, disable_cache=True))
    for number in range(30):
        add(engine, f"large {number}", prompt(40, first=number), max_tokens=50, ignore_eos=True)
    while engine.scheduler.num_waiting > 10:
        engine.step()
    engine.step()
    first = engine.scheduler.queues.waiting[0]
    small = add(engine, "small", prompt(1), max_tokens=1)
    first.num_passed = MOST_PASSED
    engine.step()
    assert small.state is ReqState.WAITING, "not for ever"
    first.num_passed = 0
    for _ in range(3):
        engine.step()
    assert small.is_finished
    assert engine.scheduler.queues.waiting[0] is first
    assert first.num_passed == 1


def test_short_prompt_is_read_beside_long_ones() -> None:
    """And the long ones go on: a part of each forward is theirs."""
    engine = FakeEngine(Setup(num_slots=2000, rows=32, chunk=16))
    long = [add(engine, f"long {n}", prompt(90, first=n), max_tokens=1) for n in range(10)]
    engine.step()
    short = [add(engine, f"short {n}", prompt(4, first=n + 5), max_tokens=1) for n in range(12)]
    for _ in range(2):
        engine.step()
    assert any(req.is_finished for req in short)
    before = long[0].kv_len
    engine.step()
    assert long[0].kv_len > before
    while not all(req.is_finished for req in short):
        engine.step()
    assert not long[3].is_finished
    engine.run()
    for req in [*long, *short]:
        assert req.output_ids == expected_output(req, engine.setup.context_len)
