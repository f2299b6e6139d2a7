"""A rank that ends takes the others with it, and says so."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from specengine import LLM, SamplingParams
from specengine.core.config_sources import config_from_flags
from specengine.core.errors import ConfigError, EngineStoppedError
from specengine.engine.async_engine import AsyncEngine
from specengine.engine.build import build_engine, load
from specengine.engine.parallel import ranks
from specengine.engine.parallel.lead import LeadEngine
from specengine.engine.parallel.ranks import Ranks
from specengine.engine.phases import Phases
from tests.support.ranks import SMALL
from tests.support.waiting import until

LIMIT = 120.0  # seconds: far less than a collective waits
LONG = SamplingParams(max_tokens=1500, temperature=0, ignore_eos=True)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[LeadEngine]:
    """On a busy machine a step may outlast the seconds after which a process ends itself."""
    monkeypatch.setattr(ranks, "_GRACE", LIMIT)
    made = build_engine(config_from_flags({**SMALL, "model": "tiny", "tp_size": 2}))
    assert isinstance(made, LeadEngine)
    yield made
    made.close()


def pids(engine: LeadEngine) -> list[int]:
    watch = engine.link.watch
    assert isinstance(watch, Ranks)
    return watch.pids


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_generation_ends_when_a_rank_is_killed(engine: LeadEngine) -> None:
    (pid,) = pids(engine)
    killed: list[float] = []

    def kill() -> None:
        until(lambda: engine.stats().num_generated_tokens > 20)
        killed.append(time.monotonic())
        os.kill(pid, signal.SIGKILL)

    threading.Thread(target=kill).start()
    with pytest.raises(EngineStoppedError, match="rank 1 was killed by signal 9"):
        LLM.of(engine).generate([[5, 9, 7]], LONG)
    assert time.monotonic() - killed[0] < LIMIT
    with pytest.raises(EngineStoppedError, match="rank 1 was killed by signal 9"):
        engine.step()


@pytest.mark.slow
def test_idle_server_stops_when_a_rank_is_killed(engine: LeadEngine) -> None:
    service = AsyncEngine(engine)
    assert service.is_ready
    os.kill(pids(engine)[0], signal.SIGKILL)
    until(lambda: not service.is_ready)

    async def ask() -> None:
        async for _ in service.generate([5, 9], LONG, "late"):
            pass

    with pytest.raises(EngineStoppedError):
        asyncio.run(ask())
    service.shutdown()


_PROGRAM = """
import sys, time
from specengine import LLM
from tests.support.ranks import SMALL
llm = LLM("tiny", tp_size=2, **SMALL)
print(*llm.engine.link.watch.pids, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_ranks_end_with_rank_0(how: signal.Signals) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM], stdout=subprocess.PIPE, env=environment, text=True
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.send_signal(how)
        until(lambda: not is_running(pid))


def test_dead_rank_is_named_though_the_abort_of_collectives_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL's waits for graphs that hold its collectives."""
    monkeypatch.setattr(ranks, "_GRACE", 0.3)
    hangs = threading.Event()
    with subprocess.Popen(["sleep", "600"], stdin=subprocess.PIPE) as process:
        watch = Ranks([process], torch.get_num_threads())

        def abort() -> None:
            hangs.wait()

        watch.abort = abort
        process.kill()
        try:
            until(lambda: watch.failure is not None)
            with pytest.raises(EngineStoppedError, match="rank 1 was killed by signal 9"):
                watch.check()
        finally:
            hangs.set()


@pytest.mark.slow
def test_closed_engine_ends_its_ranks_and_cannot_go_on(engine: LeadEngine) -> None:
    (pid,) = pids(engine)
    engine.close()
    assert not is_running(pid)
    with pytest.raises(EngineStoppedError, match="have ended"):
        engine.step()


@pytest.mark.usefixtures("one_thread_a_rank")  # puts it back
@pytest.mark.parametrize(
    ("cores", "has", "expected"),
    [
        pytest.param(64, 1, 1, id="no more than rank 0 was given"),
        pytest.param(4, 4, 2, id="no more than there are cores for"),
        pytest.param(1, 1, 1, id="one at least"),
    ],
)
def test_ranks_on_a_cpu_have_the_threads_of_rank_0(
    cores: int, has: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    torch.set_num_threads(has)
    assert ranks._threads(torch.device("cpu"), 2) == torch.get_num_threads() == expected


def test_what_ranks_cannot_share_is_refused_by_name() -> None:
    """What options tell alone: tests/engine/test_pairs.py."""
    with pytest.raises(ConfigError, match="--draft-tp-size 3: must be 1, or the 2"):
        config_from_flags({"tp_size": 2, "draft_tp_size": 3})
    with pytest.raises(ConfigError, match="--tp-size is for"):
        load(config_from_flags({**SMALL, "model": "tiny", "tp_size": 2}), Phases())
