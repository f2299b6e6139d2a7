"""The driver, with an engine in whose place every request gains a token a step."""

from __future__ import annotations

from typing import Any, cast

from specengine.core.request import FinishReason, Req, ReqState
from specengine.core.sampling import SamplingParams
from specengine.engine.loop import Engine
from specengine.lab.generate.dialogue_writer import Ask
from specengine.lab.generate.driver import Answered, EngineDriver


class CountingEngine:
    def __init__(self) -> None:
        self.scheduler = self
        self.choices: dict[Req, str] = {}
        self.live: list[Req] = []
        self.started: list[int] = []  # requests that each step began with
        self._new = 0

    @property
    def has_work(self) -> bool:
        return bool(self.live)

    def add_request(self, rid: str, prompt_ids: list[int], sampling: SamplingParams) -> None:
        req = Req(rid, prompt_ids, sampling)
        self.choices[req] = rid
        self.live.append(req)
        self._new += 1

    def step(self) -> list[Any]:
        assert not self.choices, "a choice would be detokenized at every step"
        self.started.append(self._new)
        self._new = 0
        for req in list(self.live):
            req.output_ids.append(len(req.output_ids))
            if len(req.output_ids) == req.sampling.max_tokens:
                req.state, req.finish_reason = ReqState.FINISHED, FinishReason("length")
                self.live.remove(req)
        return []

    def abort(self, rid: str) -> None:
        self.live = [req for req in self.live if req.rid != rid]


def ask(length: int) -> Ask:
    return Ask([1], SamplingParams(max_tokens=length))


def new_driver(concurrency: int) -> tuple[CountingEngine, EngineDriver[int]]:
    engine = CountingEngine()
    return engine, EngineDriver(cast(Engine, engine), concurrency)


def run(driver: EngineDriver[int]) -> list[Answered[int]]:
    answered = []
    while not driver.is_idle:
        answered += driver.step()
    return answered


def test_everything_is_answered_once() -> None:
    _, driver = new_driver(4)
    for key in range(11):
        driver.submit(key, ask(1 + key % 3))
    answered = run(driver)
    assert sorted(one.key for one in answered) == list(range(11))
    assert all(len(one.reply.token_ids) == 1 + one.key % 3 for one in answered)
    assert driver.num_tokens == sum(1 + key % 3 for key in range(11))
    assert driver.step() == []


def test_new_requests_wait_for_a_burst() -> None:
    """32 run, two at a time: one that finishes alone is not replaced before the next one."""
    engine, driver = new_driver(32)
    for key in range(32):
        driver.submit(key, ask(1 + key))
    driver.step()
    for key in range(32, 40):
        driver.submit(key, ask(100))
    for _ in range(4):
        driver.step()
    assert engine.started == [32, 0, 2, 0, 2]


def test_room_is_what_can_run_at_once() -> None:
    _, driver = new_driver(2)
    rooms = []
    for key in range(3):
        rooms.append(driver.has_room)
        driver.submit(key, ask(1))
    assert rooms == [True, True, False]


def test_letting_go() -> None:
    engine, driver = new_driver(2)
    for key in range(5):
        driver.submit(key, ask(9))
    driver.step()
    driver.abort()
    assert driver.is_idle
    assert not engine.has_work
