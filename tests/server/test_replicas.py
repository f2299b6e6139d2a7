"""Replicas: a prompt goes where its beginning is cached, unless that replica is much busier."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import asdict, fields, replace
from typing import Any

import pytest

from specengine.core.config import EngineConfig
from specengine.core.errors import EngineStoppedError
from specengine.core.parallel_config import ParallelConfig
from specengine.core.sampling import SamplingParams
from specengine.core.spec_stats import DepthChoice
from specengine.core.spec_totals import SpecTotals
from specengine.engine.outputs import EngineStats, SplitStats
from specengine.runner.fallbacks import GraphStats
from specengine.scheduler.split_policy import SplitDecision
from specengine.server import routing
from specengine.server.replicas import Replicas, added
from specengine.server.routing import MORE_REQUESTS, PrefixRouter, page_keys
from tests.server.conftest import FakeEngine

PAGE = 16


def tokens(length: int, first: int = 0) -> list[int]:
    return list(range(first, first + length))


@pytest.mark.parametrize(("length", "pages"), [(0, 0), (15, 0), (16, 0), (17, 1), (33, 2), (48, 2)])
def test_prompts_are_chains_of_whole_pages_before_their_last_token(length: int, pages: int) -> None:
    assert len(list(page_keys(tokens(length), PAGE))) == pages


def test_key_of_a_page_depends_on_all_before_it() -> None:
    one = list(page_keys(tokens(80), PAGE))
    assert list(page_keys(tokens(40), PAGE)) == one[:2]
    other = list(page_keys([99, *tokens(80)[1:]], PAGE))
    assert not set(one) & set(other)


@pytest.mark.parametrize("beyond", [2**63, -(2**63) - 1, 10**30])
def test_prompt_with_a_number_beyond_64_bits_reaches_the_replica_that_refuses_it(
    beyond: int,
) -> None:
    router = PrefixRouter(2, PAGE)
    assert router.choose([*tokens(64), beyond], [0, 1]) == 0
    router.finish(0)
    assert router.num_open == [0, 0]


def test_prompt_follows_its_longest_known_beginning() -> None:
    router, able = PrefixRouter(3, 1), [0, 1, 2]
    shared = tokens(64)
    assert router.choose(shared + tokens(64, 200), able) == 0
    assert router.choose(tokens(64, 500), able) == 1
    assert router.choose(tokens(64, 900), able) == 2
    router.finish(0)
    assert router.choose(tokens(64, 500) + tokens(9, 3), able) == 1, "not the idle one"
    assert router.choose(shared + tokens(64, 300), able) == 0
    assert router.num_open == [1, 2, 1]


def test_busy_replica_is_left_alone_and_the_prefix_lives_in_two() -> None:
    router, able = PrefixRouter(2, PAGE), [0, 1]
    places = [router.choose(tokens(64), able) for _ in range(2 * MORE_REQUESTS + 4)]
    assert places[: MORE_REQUESTS + 1] == [0] * (MORE_REQUESTS + 1)
    assert 1 in places
    assert abs(router.num_open[0] - router.num_open[1]) <= MORE_REQUESTS + 1


def test_short_prompts_go_to_the_engine_that_has_the_fewest() -> None:
    router = PrefixRouter(3, PAGE)
    assert [router.choose([1, 2], [0, 1, 2]) for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_replica_that_does_not_serve_gets_nothing() -> None:
    router = PrefixRouter(2, PAGE)
    assert router.choose(tokens(64), [0, 1]) == 0
    router.finish(0)
    assert router.choose(tokens(64), [1]) == 1
    router.forget(1)
    assert router.choose(tokens(64, 300), [0, 1]) == 0


def test_pages_of_a_cache_of_single_slots_are_put_together() -> None:
    router = PrefixRouter(2, 1)
    router.choose(tokens(16), [0, 1])
    assert router.choose(tokens(16), [0, 1]) == 1, "no whole page of 16 before the last token"


def test_prompts_that_were_not_asked_for_longest_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(routing, "MOST_PAGES", 4)
    router = PrefixRouter(2, PAGE)
    first, second, third = (tokens(33, start) for start in (0, 100, 200))  # two pages each
    for prompt in (first, second, first, third):
        router.choose(prompt, [1])
        router.finish(1)
    assert router.choose(first, [0, 1]) == 1
    router.finish(1)
    assert router.choose(second, [0, 1]) == 0, "as a new one"


async def ask(replicas: Replicas, prompt: list[int], rid: str = "a:b-0") -> str:
    sampling = SamplingParams(max_tokens=4)
    async with aclosing(replicas.generate(prompt, sampling, rid)) as outputs:  # type: ignore[type-var]
        found = [output async for output in outputs]
    return found[-1].text


def test_requests_of_one_conversation_stay_together() -> None:
    engines = [FakeEngine(), FakeEngine()]
    replicas = Replicas(engines)

    async def run() -> None:
        for first in (2, 30, 2, 30, 2):
            await ask(replicas, tokens(40, first))

    asyncio.run(run())
    assert [len(one.prompts) for one in engines] == [5, 0], "no other was open"
    assert replicas.router.num_open == [0, 0]


def test_caller_that_leaves_is_no_longer_open() -> None:
    replicas = Replicas([FakeEngine(), FakeEngine()])

    async def leave() -> None:
        outputs: Any = replicas.generate(tokens(40), SamplingParams(max_tokens=4), "a:b-0")
        async with aclosing(outputs) as found:
            async for _ in found:
                assert replicas.router.num_open == [1, 0]
                return

    asyncio.run(leave())
    assert replicas.router.num_open == [0, 0]


def test_prompt_that_was_embedded_is_no_longer_open() -> None:
    replicas = Replicas([FakeEngine(), FakeEngine()])
    asyncio.run(replicas.embed(tokens(4), "a:b-0"))
    assert replicas.router.num_open == [0, 0]


@pytest.mark.parametrize("is_replaced", [False, True])
def test_prompt_is_new_to_a_replica_whose_cache_was_emptied(is_replaced: bool) -> None:
    replicas = Replicas([FakeEngine(), FakeEngine()])
    replicas.router.choose(tokens(40), [1])
    replicas.router.finish(1)
    if is_replaced:
        replicas.replace(1, FakeEngine())
    else:
        asyncio.run(replicas.flush_cache())
    assert replicas.router.choose(tokens(40), [0, 1]) == 0


def test_one_replica_is_enough_and_none_is_an_error() -> None:
    engines = [FakeEngine(), FakeEngine()]
    replicas = Replicas(engines)
    engines[0].is_ready = False
    assert replicas.is_ready
    asyncio.run(ask(replicas, tokens(8)))
    assert len(engines[1].prompts) == 1
    engines[1].is_ready = False
    assert not replicas.is_ready
    with pytest.raises(EngineStoppedError, match="no replica"):
        asyncio.run(ask(replicas, tokens(8)))


def test_replicas_that_share_experts_are_told_to_sleep_at_once() -> None:
    """Each waits for the others; and none is asked where one does not serve."""
    parallel = ParallelConfig(dp_size=2, enable_dp_attention=True)
    engines: list[Any] = [FakeEngine(config=EngineConfig(parallel=parallel)) for _ in range(2)]
    replicas, asked = Replicas(engines), [asyncio.Event() for _ in engines]

    async def sleep(number: int) -> int:
        asked[number].set()
        await asyncio.wait_for(asked[1 - number].wait(), 10)
        return 7

    for number, one in enumerate(engines):
        one.sleep = lambda level, number=number: sleep(number)
    assert asyncio.run(replicas.sleep()) == 14
    engines[1].is_ready = False
    with pytest.raises(EngineStoppedError, match="not all engines"):
        asyncio.run(replicas.wake())


def test_counters_are_summed() -> None:
    one = EngineStats(num_running=2, num_slots=10, num_free_slots=5, model_name="m")
    one.spec = SpecTotals(num_rounds=3, accepted_per_pos=[2, 1])
    one.graphs = {"decode": GraphStats(1, 2, {"why": 3})}
    other = EngineStats(num_running=1, num_slots=10, num_free_slots=10, model_name="m")
    other.spec = SpecTotals(num_rounds=4, accepted_per_pos=[1])
    other.graphs = {"decode": GraphStats(1, 1, {})}
    total = added([one, other])
    assert (total.num_running, total.kv_usage, total.model_name) == (3, 0.25, "m")
    assert (total.spec.num_rounds, total.spec.accepted_per_pos) == (7, [3, 1])
    assert total.graphs["decode"] == GraphStats(2, 3, {"why": 3})
    assert not total.drafts_trees


def test_reasons_and_kinds_that_the_first_replica_lacks_are_counted() -> None:
    one, other = EngineStats(), EngineStats()  # the first was never asked for its counters
    one.graphs = {"decode": GraphStats(fallbacks={"a": 1})}
    other.graphs = {
        "decode": GraphStats(fallbacks={"a": 2, "b": 3}),
        "round": GraphStats(captures=4),
    }
    total = added([one, other])
    assert total.graphs["decode"].fallbacks == {"a": 3, "b": 3}
    assert total.graphs["round"].captures == 4


def filled(stats: Any) -> Any:
    """With a count in each field that has numbers, whatever its name is."""
    counts: dict[Any, Any] = {int: 1, dict: {"a": 1}, list: [1, 1]}
    given = {one.name: counts.get(type(getattr(stats, one.name))) for one in fields(stats)}
    return replace(stats, **{name: one for name, one in given.items() if one is not None})


def numbers(value: Any) -> list[int]:
    if isinstance(value, dict):
        return [number for one in value.values() for number in numbers(one)]
    if isinstance(value, list):
        return [number for one in value for number in numbers(one)]
    return [value] if type(value) is int else []


def test_every_counter_is_summed_and_what_was_decided_is_not() -> None:
    """Of the replicas, the first was never asked for its counters."""
    one = filled(EngineStats(num_state_snapshots=1))
    one.graphs, one.spec = {"round": filled(GraphStats())}, filled(SpecTotals())
    one.split = filled(SplitStats())
    total = added([EngineStats(), one, one])
    assert len(numbers(asdict(one))) > 30
    assert numbers(asdict(total)) == [2 * number for number in numbers(asdict(one))]
    one.split = replace(one.split, decision=SplitDecision(3, 0.5, "why"))
    one.depth = DepthChoice(4, "why", 1.5)
    total = added([EngineStats(), one, one])
    assert total.split is not None
    assert (total.depth, total.split.decision) == (one.depth, one.split.decision)
