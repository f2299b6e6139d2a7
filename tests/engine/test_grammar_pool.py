"""Untrusted grammars: refused in words, within their time, while the event loop goes on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from specengine.core.errors import QueueFullError, RequestError
from specengine.core.grammar import GrammarSpec
from specengine.core.limits import LimitConfig
from specengine.engine.grammar.compiler import GrammarCompiler
from specengine.engine.grammar.pool import GrammarPool
from specengine.engine.grammar.state import LlguidanceState
from specengine.engine.grammar.trial import NICENESS
from tests.halves import slow_but
from tests.support.grammars import EOS, VOCAB, World, mask_of
from tests.support.waiting import until

SLOW = GrammarSpec.regex("(a{1000}){1000}")  # half a second to the first mask


@pytest.fixture(scope="module")
def world(small_models: dict[str, Path]) -> World:
    return World(small_models["llama"])


Make = Callable[..., GrammarPool]


async def start(pool: GrammarPool, spec: GrammarSpec) -> LlguidanceState:
    """The beginning of a grammar; its trial ends where this is cancelled."""
    job = pool.submit(spec)
    try:
        return await asyncio.wrap_future(job.future)
    finally:
        job.cancel()


@pytest.fixture
def make_pool(world: World) -> Iterator[Make]:
    pools = []

    def make(**limits: Any) -> GrammarPool:
        compiler = GrammarCompiler(world.tokenizer, VOCAB, frozenset({EOS}))
        pools.append(GrammarPool(compiler, LimitConfig(**limits)))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def nested(depth: int) -> GrammarSpec:
    schema = '{"type":"integer"}'
    for _ in range(depth):
        schema = '{"type":"array","items":' + schema + "}"
    return GrammarSpec.json_schema(schema, "field")


HOSTILE = [
    GrammarSpec.regex("(a{1000}){1000}", "field"),
    GrammarSpec.regex("(((a{100}){100}){100}){100}", "field"),
    GrammarSpec.regex("(" * 20_000, "field"),
    GrammarSpec.ebnf('start: start "a"', "field"),
    GrammarSpec.ebnf("start: " + "(" * 20_000 + '"a"' + ")" * 20_000, "field"),
    GrammarSpec.ebnf("start: A\nA: B{1000}\nB: C{1000}\nC: /x/", "field"),
    GrammarSpec.json_schema({"$ref": "#"}, "field"),
    GrammarSpec.json_schema({"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}, "field"),
    GrammarSpec.json_schema("[" * 960 + "]" * 960, "field"),
    nested(960),
    GrammarSpec.json_schema({"type": "integer", "multipleOf": 1_000_003, "minimum": 3}, "field"),
    GrammarSpec.json_schema(
        {"allOf": [{"anyOf": [{"minLength": i}, {"maxLength": i}]} for i in range(1, 20)]}, "field"
    ),
]


def test_grammar_is_compiled_and_kept(make_pool: Make, world: World) -> None:
    pool = make_pool()

    async def masks() -> list[set[int]]:
        return [mask_of(await start(pool, GrammarSpec.regex(letter))) for letter in "aba"]

    a, b = {world.token("a")}, {world.token("b")}
    assert asyncio.run(masks()) == [a, b, a]


def test_grammar_may_name_tokens_by_their_ids(make_pool: Make, world: World) -> None:
    token = world.tokenizer.bos_token_id  # which no text spells
    spec = GrammarSpec.ebnf(f'start: <[{token}]> "a"')
    state = asyncio.run(start(make_pool(), spec))
    assert mask_of(state) == {token}
    assert state.accept(token)
    assert mask_of(state) == {world.token("a")}


def test_states_are_independent(make_pool: Make, world: World) -> None:
    pool = make_pool()

    async def two() -> Any:
        return [await start(pool, GrammarSpec.regex("ab")) for _ in range(2)]

    one, other = asyncio.run(two())
    assert one.accept(world.token("a"))
    assert mask_of(other) == {world.token("a")}


@pytest.fixture(scope="module")
def pool_of_all(world: World) -> Iterator[GrammarPool]:
    """One process for all hostile grammars, as a server has it: each takes a third of a second to
    start."""
    compiler = GrammarCompiler(world.tokenizer, VOCAB, frozenset({EOS}))
    pool = GrammarPool(compiler, LimitConfig(grammar_workers=1))
    yield pool
    pool.close()


@pytest.mark.parametrize(
    "spec", slow_but([*HOSTILE[:1], *HOSTILE[2:]], HOSTILE), ids=lambda spec: spec.text[:30]
)
def test_hostile_grammar_is_refused_in_one_line(
    pool_of_all: GrammarPool, spec: GrammarSpec
) -> None:
    pool = pool_of_all
    with pytest.raises(RequestError, match="field does not compile: ") as caught:
        asyncio.run(start(pool, spec))
    message = str(caught.value)
    assert caught.value.param == "field"
    assert "\n" not in message
    assert "<state>" not in message
    assert len(message) < 300
    asyncio.run(start(pool, GrammarSpec.regex("a" * len(message))))  # the pool works on


def test_grammar_that_takes_too_long_is_killed(make_pool: Make) -> None:
    pool = make_pool(grammar_timeout=0.1)
    with pytest.raises(RequestError, match=r"takes more than 0\.1 s"):
        asyncio.run(start(pool, SLOW))
    compile_at_last(pool)


def compile_at_last(pool: GrammarPool) -> None:
    """Within little time: a busy machine may need several."""

    def compiles() -> bool:
        with suppress(RequestError):
            return bool(asyncio.run(start(pool, GrammarSpec.regex("a"))))
        return False

    until(compiles)


def process_of(pool: GrammarPool) -> int:
    process = pool._trials[0]._process
    assert process is not None
    return process.pid


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_cancelling_kills_the_trial_and_frees_its_place(make_pool: Make) -> None:
    """A process that is stopped answers to nothing."""
    pool = make_pool(grammar_workers=1, grammar_timeout=60)

    async def cancelled() -> None:
        await start(pool, GrammarSpec.regex("a"))
        os.kill(process_of(pool), signal.SIGSTOP)
        task = asyncio.create_task(start(pool, GrammarSpec.regex("b")))
        await asyncio.sleep(0.1)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await start(pool, GrammarSpec.regex("c"))

    asyncio.run(cancelled())


def test_others_wait_in_a_bounded_queue_and_the_loop_goes_on(make_pool: Make) -> None:
    pool = make_pool(grammar_workers=1, max_queued_grammars=2, grammar_timeout=60)

    async def crowd() -> tuple[int, list[Any]]:
        await start(pool, GrammarSpec.regex("z"))
        os.kill(process_of(pool), signal.SIGSTOP)
        tasks = [asyncio.create_task(start(pool, GrammarSpec.regex(x))) for x in "abcd"]
        ticks = 0
        while not tasks[3].done():
            await asyncio.sleep(0.001)
            ticks += 1
        await start(pool, GrammarSpec.regex("z"))  # kept: it waits for no other
        os.kill(process_of(pool), signal.SIGCONT)
        return ticks, await asyncio.gather(*tasks, return_exceptions=True)

    ticks, results = asyncio.run(crowd())
    assert ticks > 0
    assert [isinstance(one, Exception) for one in results] == [False, False, False, True]
    assert isinstance(results[3], QueueFullError)


def test_prompts_with_the_same_grammar_wait_for_one_trial(make_pool: Make, world: World) -> None:
    """As many as like, whatever the queue holds; one that leaves takes nothing from the others."""
    pool = make_pool(grammar_workers=1, max_queued_grammars=1, grammar_timeout=60)

    async def crowd() -> tuple[bool, list[LlguidanceState]]:
        await start(pool, GrammarSpec.regex("z"))
        os.kill(process_of(pool), signal.SIGSTOP)
        tasks = [
            asyncio.create_task(start(pool, GrammarSpec.regex(x, f"{x}{number}")))
            for number in range(4)
            for x in "ab"
        ]
        await asyncio.sleep(0.05)
        tasks[0].cancel()
        await asyncio.sleep(0.05)
        waits = not any(task.done() for task in tasks[1:])
        os.kill(process_of(pool), signal.SIGCONT)
        return waits, await asyncio.gather(*tasks[1:])

    waits, states = asyncio.run(crowd())
    assert waits
    a, b = world.token("a"), world.token("b")
    assert [mask_of(one) for one in states] == [{b}, {a}, {b}, {a}, {b}, {a}, {b}]
    assert all(one.accept(a) for one in states[1::2])
    assert not pool._open


def test_prompts_with_the_same_bad_grammar_are_told_of_their_own_fields(make_pool: Make) -> None:
    pool = make_pool()
    jobs = [pool.submit(GrammarSpec.regex("((", f"params[{number}]")) for number in range(3)]
    for number, job in enumerate(jobs):
        with pytest.raises(RequestError, match=rf"params\[{number}\] does not compile") as caught:
            job.future.result(60)
        assert caught.value.param == f"params[{number}]"


def test_trial_that_was_killed_takes_nothing_from_the_next(make_pool: Make) -> None:
    trial = make_pool(grammar_workers=1)._trials[0]
    spec = GrammarSpec.regex("a")
    assert trial.attempt(spec)[0] is None
    trial.kill()
    with pytest.raises(RequestError, match="no request waits for it"):
        trial.attempt(spec)
    trial.settle()
    assert trial.attempt(spec)[0] is None


def test_trial_gets_less_of_a_core_than_the_engine(make_pool: Make) -> None:
    pool = make_pool(grammar_workers=1)
    asyncio.run(start(pool, GrammarSpec.regex("a")))
    least = min(os.getpriority(os.PRIO_PROCESS, 0) + NICENESS, 19)
    assert os.getpriority(os.PRIO_PROCESS, process_of(pool)) == least
    group = Path(f"/proc/{process_of(pool)}/autogroup")
    if os.geteuid() == 0 and group.exists():  # others may change one group in 0.1 s
        assert group.read_text().endswith(f"nice {NICENESS}\n")


def test_trial_tells_what_a_compiled_grammar_holds(
    make_pool: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few characters may stand for megabytes."""
    pool = make_pool(grammar_workers=1)
    told: list[int] = []
    begin = pool._compiler.start

    def noted(spec: GrammarSpec, num_bytes: int = 0) -> LlguidanceState:
        told.append(num_bytes)
        return begin(spec, num_bytes)

    monkeypatch.setattr(pool._compiler, "start", noted)
    for regex in ("a", "a", "b", "a{20000}"):
        asyncio.run(start(pool, GrammarSpec.regex(regex)))
    assert len(told) == 3  # one was kept
    assert all(0 < one < 2**20 for one in told[:2])
    assert told[2] > 4 * 2**20


def test_grammar_is_compiled_though_no_thread_could_be_started_before(
    make_pool: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, spec = make_pool(), GrammarSpec.regex("a")

    def fail(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(pool._threads, "submit", fail)
        with pytest.raises(RuntimeError):
            pool.submit(spec)
    asyncio.run(asyncio.wait_for(start(pool, spec), 60))


def test_closing_leaves_no_process(make_pool: Make) -> None:
    pool = make_pool()
    asyncio.run(start(pool, GrammarSpec.regex("a")))
    pid = process_of(pool)
    assert is_alive(pid)
    pool.close()
    assert not is_alive(pid)


def test_process_ends_with_its_parent_or_its_time(make_pool: Make) -> None:
    """Its input ends where the parent has gone, and its alarm needs no parent at all."""
    pool = make_pool(grammar_workers=1)
    asyncio.run(start(pool, GrammarSpec.regex("a")))
    process = pool._trials[0]._process
    assert process is not None
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(60) == 0
    other = make_pool(grammar_workers=1, grammar_timeout=0.1)
    compile_at_last(other)
    process = other._trials[0]._process
    assert process is not None
    assert process.stdin is not None
    process.stdin.write(json.dumps(asdict(SLOW)) + "\n")
    process.stdin.flush()
    assert process.wait(60) == -signal.SIGALRM
