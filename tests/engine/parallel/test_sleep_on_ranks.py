"""Ranks sleep and wake together, all or none, and requests go on with the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.config_sources import config_from_flags
from specengine.core.errors import (
    ConfigError,
    EngineAsleepError,
    EngineStoppedError,
    ModelLoadError,
    OutOfMemoryError,
)
from specengine.core.parallel import Link, communicator
from specengine.core.sharing import ExpertSharers
from specengine.engine.build import build_engine, load
from specengine.engine.loop import Engine
from specengine.engine.phases import Phases
from specengine.layers.in_place import weights_of
from tests.support.pretended_ranks import on_threads
from tests.support.ranks import SMALL, Group, same_on_all, told
from tests.support.waiting import until

PROMPTS = [[5, 9, 7, 33, 2], [8, 8, 4, 8, 8]]
GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
CHAIN = SpecConfig(algorithm="EAGLE3", num_steps=3, adaptive=False)
Pair = tuple[LLM, LLM]  # one engine, and two ranks
THIS = "tests.engine.parallel.test_sleep_on_ranks"


def pair_on(link: Link) -> Pair:
    return Group("tiny", 2, link, enable_sleep_mode=True).pair(CHAIN, "device")


@pytest.fixture(scope="module")
def pair(link: Link) -> Pair:
    return pair_on(link)


def memory_is(engine: Engine, given_back: bool) -> None:
    """Checked on every rank: one on which it does not hold ends."""
    model: Any = engine.parts.worker.runner.model
    large = [one for one in weights_of(model) if one.nbytes > 16384]
    assert engine.sleeper.is_asleep == given_back
    assert large[0].flatten()[2048:2560].any() != given_back


def cannot(engine: Engine, do: str, rank: int, times: int = 1) -> None:
    """From now on Region.release or Region.restore fails so often on one rank."""
    if engine.parts.link.communicator.rank == rank:
        fail(engine, do, times)


def fail(engine: Engine, do: str, times: int = 1) -> None:
    region: Any = engine.sleeper._region
    left, run = [None] * times, getattr(region, do)

    def failing(*given: Any) -> Any:
        if left:
            left.pop()
            error = OutOfMemoryError if do == "restore" else ConfigError
            raise error("another process has it")
        return run(*given)

    setattr(region, do, failing)


def step_to_the_end(engine: Engine) -> dict[str, list[int]]:
    found = {}
    while engine.has_work:
        found |= {one.rid: one.token_ids for one in engine.step()}
    engine.scheduler.check_invariant()
    return found


@pytest.mark.parametrize("level", [1, 2])
def test_requests_of_two_ranks_wait_in_sleep_and_go_on(level: int, pair: Pair) -> None:
    expected, two = same_on_all(pair, PROMPTS, GREEDY), pair[1]
    engine: Any = two.engine
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), prompt, GREEDY)
    for _ in range(3):
        engine.step()
    own = pair[0].sleep(level)
    given = two.sleep(level)
    assert given > own > 0, "norms, and what is not cut, is on both ranks"
    assert two.sleep(level) == 0, "it sleeps already"
    engine.call(f"{THIS}:memory_is", given_back=True)
    assert not engine.has_work
    with pytest.raises(EngineAsleepError):
        two.generate(PROMPTS, GREEDY)
    with pytest.raises(EngineAsleepError):
        two.update_weights("tiny")  # and rank 1 is not told
    two.wake()
    pair[0].wake()
    engine.call(f"{THIS}:memory_is", given_back=False)
    found = step_to_the_end(engine)
    assert [found["0"], found["1"]] == [one[0] for one in expected]
    assert same_on_all(pair, PROMPTS, GREEDY) == expected


@pytest.mark.parametrize(
    ("rank", "level"),
    [(0, 2), (1, 1), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((0, 1), (1, 2)))],
)
def test_no_rank_sleeps_or_wakes_where_one_cannot(rank: int, level: int, pair: Pair) -> None:
    two = pair[1]
    expected = told(two.generate(PROMPTS, GREEDY))
    engine: Any = two.engine
    other = "another rank" if rank else "another process"
    engine.call(f"{THIS}:cannot", do="release", rank=rank)
    with pytest.raises(ConfigError, match=other):
        two.sleep(level)
    engine.call(f"{THIS}:memory_is", given_back=False)
    assert told(two.generate(PROMPTS, GREEDY)) == expected
    assert two.sleep(level) > 0
    engine.call(f"{THIS}:cannot", do="restore", rank=rank)
    with pytest.raises((OutOfMemoryError, ModelLoadError), match=other):
        two.wake()
    engine.call(f"{THIS}:memory_is", given_back=True)
    two.wake()
    assert told(two.generate(PROMPTS, GREEDY)) == expected


def test_engine_does_not_sleep_beside_another_on_the_same_weights(pair: Pair) -> None:
    llm = pair[0]
    assert llm.engine.weights is not None
    other = build_engine(llm.engine.parts.config, llm.engine.weights.loaded)
    with pytest.raises(ConfigError, match="other engines"):
        llm.sleep()
    del other
    assert llm.sleep() > 0
    llm.wake()


def test_rank_that_can_neither_wake_nor_sleep_on_ends_all(last_of_its_ranks: Link) -> None:
    two = pair_on(last_of_its_ranks)[1]
    engine: Any = two.engine
    two.sleep()
    engine.call(f"{THIS}:cannot", do="restore", rank=0)
    engine.call(f"{THIS}:cannot", do="release", rank=1)
    with pytest.raises((EngineStoppedError, OutOfMemoryError)):
        two.wake()
    until(lambda: engine.link.watch.failure)
    with pytest.raises(EngineStoppedError, match="rank 1 has ended"):
        two.wake()


def make(folder: Path) -> Engine:
    flags = {**SMALL, "model": str(folder), "enable_sleep_mode": True}
    config, sharers = config_from_flags(flags), ExpertSharers(communicator())
    return build_engine(config, load(config, Phases(), None, sharers))


def run_alone(folder: Path) -> list[dict[str, list[int]]]:
    llm, found = LLM(str(folder), **SMALL), []
    for prompt in PROMPTS:
        llm.engine.add_request("one", prompt, GREEDY)
        found.append(step_to_the_end(llm.engine))
    return found


@pytest.mark.usefixtures("one_thread_a_rank")
def test_engines_that_share_experts_sleep_together(small_models: dict[str, Path]) -> None:
    """Asked one after the other, amid requests of both."""
    folder = small_models["qwen3moe"]
    expected = run_alone(folder)

    def try_it(engine: Engine, rank: int, level: int) -> None:
        def steps(count: int) -> dict[str, list[int]]:
            found = {}
            for _ in range(count):
                found |= {one.rid: one.token_ids for one in engine.step()}
            return found

        engine.add_request("one", PROMPTS[rank], GREEDY)
        steps(3 + 2 * rank)  # the other goes on meanwhile
        if rank == 1:
            fail(engine, "release")
        with pytest.raises(ConfigError, match="another"):
            engine.sleep(level)
        steps(3 - 2 * rank)
        assert engine.sleep(level) > 0
        memory_is(engine, True)
        steps(4)
        if rank == 0:
            fail(engine, "restore")
        with pytest.raises((OutOfMemoryError, ModelLoadError), match="another"):
            engine.wake()
        memory_is(engine, True)
        engine.wake()
        memory_is(engine, False)
        assert steps(16) == expected[rank]
        engine.scheduler.check_invariant()

    def run() -> None:
        engine = make(folder)
        for level in (1, 2):
            try_it(engine, communicator().rank, level)

    on_threads(2, run)
