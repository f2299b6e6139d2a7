"""Memory is given back when work has paused, and now and then while it goes on."""

from __future__ import annotations

import gc
import weakref

import pytest

from specengine.core import trim
from specengine.core.trim import AT_LEAST_EVERY, IDLE, IdleTrim


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(trim, "monotonic", clock)
    return clock


@pytest.fixture
def trimmed(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When it was; there and then, rather than in a thread."""
    times: list[float] = []

    class Now:
        def __init__(self, target: object, name: str, daemon: bool) -> None:
            assert target is trim.trim_memory

        def start(self) -> None:
            times.append(clock.now)

    monkeypatch.setattr(trim.threading, "Thread", Now)
    return times


def run(clock: Clock, idle: IdleTrim, works: bool, seconds: float) -> None:
    for _ in range(int(seconds)):
        clock.now += 1
        idle.note(works)


def test_after_work_and_never_without(clock: Clock, trimmed: list[float]) -> None:
    idle = IdleTrim()
    run(clock, idle, works=False, seconds=100)
    assert trimmed == []
    run(clock, idle, works=True, seconds=5)
    run(clock, idle, works=False, seconds=100)
    assert trimmed[-1] == pytest.approx(105 + IDLE, abs=1.1)
    count = len(trimmed)
    run(clock, idle, works=False, seconds=100)
    assert len(trimmed) == count


def test_now_and_then_while_work_never_pauses(clock: Clock, trimmed: list[float]) -> None:
    run(clock, IdleTrim(), works=True, seconds=3 * AT_LEAST_EVERY + 5)
    assert len(trimmed) == 3


class Looped:
    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize(("works", "enabled"), [(False, True), (True, True), (False, False)])
def test_what_refers_to_itself_is_collected_in_a_pause_alone(
    clock: Clock, trimmed: list[float], works: bool, enabled: bool
) -> None:
    """A capture of graphs has the collector disabled."""
    idle, before = IdleTrim(), gc.get_threshold()
    gc.set_threshold(0)  # it collects when asked to
    if not enabled:
        gc.disable()
    try:
        looped = weakref.ref(Looped())
        idle.note(works=True)
        run(clock, idle, works=works, seconds=AT_LEAST_EVERY + 5)
        assert trimmed
        assert (looped() is None) is (enabled and not works)
    finally:
        gc.set_threshold(*before)
        gc.enable()


def test_trimming_is_harmless() -> None:
    trim.trim_memory()
