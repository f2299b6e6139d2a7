"""What of an engine that serves fails for one request or one operation, and what ends it."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from typing import Any, cast

import pytest

from specengine.core.errors import (
    ConfigError,
    EngineAsleepError,
    EngineStoppedError,
    InvariantError,
    ModelLoadError,
    RequestError,
    SpecEngineError,
)
from specengine.core.grammar import GrammarSpec
from specengine.core.request import FinishReason
from specengine.core.sampling import SamplingParams
from specengine.engine.grammar.pool import GrammarJob
from specengine.engine.outputs import RequestOutput
from tests.engine.test_serving import Pair, gather, settle

PARAMS = SamplingParams(max_tokens=2)
WITH_GRAMMAR = SamplingParams(max_tokens=2, n=2, grammar=GrammarSpec.regex("a+"))


class Grammars:
    """A GrammarPool of grammars that are compiled when a test says so."""

    def __init__(self) -> None:
        self.jobs: list[GrammarJob] = []
        self.left: list[GrammarJob] = []

    def submit(self, spec: GrammarSpec) -> GrammarJob:
        self.jobs.append(GrammarJob(spec, self.left.append))
        return self.jobs[-1]


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def queue_then_fail(pair: Pair) -> None:
    """The second choice of a request cannot be queued."""
    add = pair.engine.add_request

    def fail(rid: str, prompt_ids: list[int], sampling: SamplingParams, *more: Any) -> None:
        add(rid, prompt_ids, SamplingParams(), *more)
        raise OSError(errno.EMFILE, "too many open files")

    pair.engine.add_request = fail  # type: ignore[method-assign]


def compile_in_vain(pair: Pair) -> None:
    """The process that tries a grammar cannot be started."""
    grammars = Grammars()
    pair.host._grammars = cast(Any, grammars)
    pair.host.post(
        lambda: grammars.jobs[0].future.set_exception(OSError(errno.EMFILE, "too many open files"))
    )


def submit_in_vain(pair: Pair) -> None:
    """No thread can be started that waits for that process."""
    grammars: Any = Grammars()
    grammars.submit = raising(RuntimeError("can't start new thread"))
    pair.host._grammars = grammars


@pytest.mark.parametrize("fail", [queue_then_fail, compile_in_vain, submit_in_vain])
def test_request_that_cannot_be_queued_is_refused_alone(
    fail: Callable[[Pair], None], caplog: pytest.LogCaptureFixture
) -> None:
    pair, found = Pair(), list[RequestOutput]()

    async def run() -> None:
        good = asyncio.create_task(gather(pair.streams.generate([65], PARAMS, "b", True), found))
        await settle()
        fail(pair)
        outputs = pair.streams.generate([65], WITH_GRAMMAR, "a", True)
        bad = asyncio.create_task(gather(outputs, []))
        await settle()
        for _ in range(3):
            pair.host.turn()
            pair.pass_on()
            await settle()
        with pytest.raises(SpecEngineError, match="internal error"):
            await bad
        await good

    asyncio.run(asyncio.wait_for(run(), 20))
    assert found[-1].finish_reason == FinishReason("length")
    assert not pair.engine.has_work, "nor any choice of the one that was refused"
    assert not pair.host._open
    assert "Traceback" in caplog.text


def answer(pair: Pair, what: str, **arguments: Any) -> Any:
    """Of one operation, as its caller gets it."""

    async def run() -> Any:
        task = asyncio.create_task(pair.streams.operate(what, **arguments))
        await settle()
        pair.host.turn()
        pair.pass_on()
        return await task

    return asyncio.run(asyncio.wait_for(run(), 20))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (EngineAsleepError("wake it"), EngineAsleepError),
        (ConfigError("no such level"), RequestError),
        (ModelLoadError("no such model"), RequestError),
        (RequestError("no such thing", "field"), RequestError),
    ],
    ids=["sleeping", "config", "model", "request"],
)
def test_refused_operation_raises_the_error_of_its_kind(error: Any, kind: type[Exception]) -> None:
    pair = Pair()
    pair.host._operations["sleep"] = raising(error)
    with pytest.raises(kind, match=str(error)) as caught:
        answer(pair, "sleep", level=1)
    assert type(caught.value) is kind
    assert getattr(caught.value, "param", None) == getattr(error, "param", None)


def test_question_that_fails_leaves_the_engine_running(caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair()
    pair.host._operations["stats"] = raising(ZeroDivisionError())
    with pytest.raises(SpecEngineError, match="internal error"):
        answer(pair, "stats")
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize(
    "error",
    [RuntimeError("device-side assert"), InvariantError("a page"), EngineStoppedError("rank 1")],
    ids=lambda one: type(one).__name__,
)
def test_change_that_fails_midway_ends_the_engine(error: Exception) -> None:
    """A launched round was collected in it, or weights are half in place."""
    pair = Pair()
    pair.host._operations["update_weights"] = raising(error)
    with pytest.raises(type(error)):
        answer(pair, "update_weights")


@pytest.mark.parametrize("names", [None, ["a"]])
def test_operator_ends_requests_whose_grammars_are_compiled(names: list[str] | None) -> None:
    pair, grammars, found = Pair(), Grammars(), list[RequestOutput]()
    pair.host._grammars = cast(Any, grammars)
    pair.engine.give_up = lambda names: 0  # type: ignore[attr-defined]

    async def run() -> int:
        first = pair.streams.generate([65], WITH_GRAMMAR, "a:job-0", False)
        ended = asyncio.create_task(gather(first, found))
        second = pair.streams.generate([65], WITH_GRAMMAR, "b:job2-0", True)
        kept = asyncio.create_task(gather(second, []))
        asked = asyncio.create_task(pair.streams.operate("give_up", names=names))
        await settle()
        pair.host.turn()
        pair.pass_on()
        await ended
        await settle()
        assert kept.done() == (names is None)
        kept.cancel()
        await asyncio.gather(kept, return_exceptions=True)
        return int(await asked)

    assert asyncio.run(asyncio.wait_for(run(), 20)) == (2 if names is None else 1)
    assert [one.index for one in found] == [0, 1]
    assert all(one.finish_reason and one.finish_reason.kind == "abort" for one in found)
    assert grammars.left == grammars.jobs, "those that were ended, and the one that its caller left"
    assert not pair.host._open
