"""Requests of a lower number of priority go before others."""

from __future__ import annotations

import pytest

from specengine.core.errors import RequestError
from specengine.core.request import Req
from specengine.core.sampling import SamplingParams
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
