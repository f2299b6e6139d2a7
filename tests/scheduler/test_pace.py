"""Prompts are split by the time that forwards take."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from specengine.core.config import EngineConfig
from specengine.core.forward_mode import ForwardMode
from specengine.core.sampling import SamplingParams
from specengine.engine.parts import EngineParts
from specengine.engine.serving.pacing import LONGEST, pace_prompts
from specengine.scheduler.pace import FIRST, LEAST, PromptPace
from tests.scheduler.fake_engine import FakeEngine, Setup, expected_output

MOST = 512


@dataclass
class Machine:
    """Takes `cost` seconds a prompt token, and `fixed` a forward."""

    cost: float
    fixed: float = 0.0
    now: float = 0.0
    pace: PromptPace = field(init=False)

    def __post_init__(self) -> None:
        self.pace = PromptPace(0.1, lambda: self.now)

    def forward(self, wanted: int = 10_000) -> int:
        """Its tokens, of a prompt that has `wanted` left."""
        size = min(wanted, self.pace.begin(MOST))
        self.now += self.fixed + self.cost * size
        self.pace.end(size)
        return size


def test_fast_machine_comes_to_whole_chunks() -> None:
    machine = Machine(cost=1e-5)
    assert [machine.forward() for _ in range(4)] == [FIRST, 2 * FIRST, MOST, MOST]


@pytest.mark.parametrize("fixed", [0.0, 0.04])
def test_forwards_come_to_last_as_long_as_they_may(fixed: float) -> None:
    machine = Machine(cost=4e-4, fixed=fixed)
    sizes = [machine.forward() for _ in range(20)]
    assert fixed + machine.cost * sizes[-1] == pytest.approx(0.1, rel=0.05)
    assert fixed + machine.cost * max(sizes) < 0.2


def test_slow_machine_still_takes_some_tokens() -> None:
    machine = Machine(cost=1.0)
    assert [machine.forward() for _ in range(3)] == [FIRST, LEAST, LEAST]


def test_slower_forward_shrinks_the_next_at_once_and_faster_ones_grow_it_again() -> None:
    machine = Machine(cost=2e-4)
    assert max(machine.forward() for _ in range(5)) == pytest.approx(500, abs=1)
    machine.cost = 1e-3  # other work has come
    assert [machine.forward(), machine.forward()] == pytest.approx([500, 100], abs=1)
    machine.cost = 2e-4
    sizes = [machine.forward() for _ in range(4)]
    assert sizes == pytest.approx([100, 200, 400, 500], abs=4)


def test_forwards_that_are_not_full_grow_nothing_and_few_tokens_shrink_nothing() -> None:
    machine = Machine(cost=1e-5)
    machine.forward(FIRST - 1)
    machine.fixed = 5.0
    machine.forward(LEAST - 1)
    assert machine.pace.begin(MOST) == FIRST


def test_prompt_of_a_slow_engine_lets_a_short_one_pass_sooner_and_says_the_same() -> None:
    engine = FakeEngine(Setup(chunk=512, context_len=700, num_slots=2000))
    clock = iter(range(10_000))
    engine.scheduler.admission.pace = PromptPace(0.1, lambda: float(next(clock)))
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    long = engine.add("long", [1 + i % 20 for i in range(600)], sampling)
    batch = engine.step()
    assert batch is not None
    assert batch.extend_lens == [FIRST]
    short = engine.add("short", [7, 8, 9], sampling)
    batch = engine.step()
    assert batch is not None
    assert batch.forward_mode is ForwardMode.EXTEND
    assert dict(zip(batch.reqs, batch.extend_lens, strict=True)) == {long: LEAST - 3, short: 3}
    engine.run()
    assert [one.output_ids for one in (long, short)] == [
        expected_output(one, 700) for one in (long, short)
    ]


@pytest.mark.parametrize(
    ("device", "ranks", "seconds"),
    [("cpu", 1, LONGEST), ("cuda", 1, float("inf")), ("cpu", 2, float("inf"))],
)
def test_prompts_are_paced_where_one_rank_sees_what_forwards_take(
    device: str, ranks: int, seconds: float
) -> None:
    scheduler, config = Setup().scheduler(), EngineConfig()
    object.__setattr__(config.model, "device", device)
    link = SimpleNamespace(communicator=SimpleNamespace(size=ranks))
    parts: Any = SimpleNamespace(config=config, scheduler=scheduler, link=link)
    pace_prompts(cast(EngineParts, parts))
    assert scheduler.admission.pace.seconds == seconds
