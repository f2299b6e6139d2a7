"""Captures of an idle server wait until there has been no request for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from specengine.core.request import FinishReason, Req
from specengine.core.sampling import SamplingParams
from specengine.engine.async_engine import AsyncEngine
from specengine.engine.background_capture import QuietTime
from specengine.engine.loop import Engine
from specengine.engine.outgoing import Choice
from tests.server.conftest import make_tokenizer
from tests.support.waiting import until

QUIET = 60.0  # seconds of the fake clock: the thread wakes when a test wakes it


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeEngine:
    """Records what runs, in order; `left` captures are there to be made."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.left = 0
        self.waiting: list[str] = []
        self.in_the_air = False
        self.keeps_turning = False
        self.on_capture: Callable[[], object] = lambda: None
        self.parts = SimpleNamespace(
            tokenizer=make_tokenizer(),
            config=None,
            model_name="fake",
            context_length=200,
            pooling=None,
            sampling_defaults={},
        )

    @property
    def has_work(self) -> bool:
        return bool(self.waiting)

    def add_request(self, rid: str, *_: Any) -> None:
        self.waiting.append(rid)

    def advance(self) -> list[Choice]:
        rid = self.waiting.pop()
        self.done.append(rid)
        self.in_the_air = True
        req = Req(rid, [1], SamplingParams(), finish_reason=FinishReason("stop"))
        return [Choice(req, rid, 0, None, True)]

    def call_if_stopped(self, tell: Callable[[], object]) -> None: ...

    def check(self) -> None: ...

    def use_idle_moment(
        self, may_capture: bool = True, is_wanted: Callable[[], bool] = lambda: False
    ) -> bool:
        if self.in_the_air:
            self.in_the_air = False
            self.done.append("landed")
            return True
        if not may_capture or not self.left:
            return False
        self.left -= 1
        self.done.append("capture")
        self.on_capture()
        return True

    def close(self) -> None:
        return


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def served(engine: FakeEngine, clock: Clock) -> Iterator[AsyncEngine]:
    served = AsyncEngine(cast(Engine, engine), prepares=True, quiet=QuietTime(QUIET, clock))
    yield served
    served.shutdown()


def ask(served: AsyncEngine, rid: str) -> None:
    async def outputs() -> None:
        async for _ in served.generate([1], SamplingParams(), rid):
            pass

    asyncio.run(outputs())


def test_the_time_begins_anew_with_each_request() -> None:
    clock = Clock()
    quiet = QuietTime(2.0, clock)
    clock.now = 1.5
    assert quiet.left == 0.5
    quiet.restart()
    clock.now = 3.0
    assert quiet.left == 0.5
    clock.now = 9.0
    assert quiet.left == 0.0


def test_requests_behind_the_start_or_each_other_wait_for_no_capture(
    served: AsyncEngine, engine: FakeEngine, clock: Clock
) -> None:
    engine.left = 5
    for place in range(4):
        ask(served, f"request {place}")
        until(lambda: engine.done[-1] == "landed")  # that waits for nothing
        clock.now += 0.9 * QUIET
    assert "capture" not in engine.done


def test_captures_begin_behind_a_pause_and_end_with_a_request(
    served: AsyncEngine, engine: FakeEngine, clock: Clock
) -> None:
    def arrive() -> None:
        engine.on_capture = lambda: None
        served._host.post(lambda: engine.add_request("request"))

    engine.left, engine.on_capture = 5, arrive
    clock.now += QUIET
    served._wake.set()
    until(lambda: "landed" in engine.done)
    assert engine.done == ["capture", "request", "landed"], "one capture, then what has come"
    clock.now += QUIET
    served._wake.set()
    until(lambda: engine.left == 0)
    assert engine.done[3:] == ["capture"] * 4
