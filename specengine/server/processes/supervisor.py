"""The parent of all processes of a server: it listens, starts them, and starts them again."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from specengine.core.config import EngineConfig
from specengine.server.listening import ENDING, address, check_tls, listen, read_keys, ready
from specengine.server.metrics_shared import VARIABLE
from specengine.server.processes.acceptor import Acceptor
from specengine.server.processes.channel import (
    Beat,
    Drain,
    Drained,
    Message,
    Serves,
    StartFrontEnd,
    Stop,
    Up,
    messages_of,
)
from specengine.server.processes.children import Child, Restarts, spawn
from specengine.server.processes.engines import Engines, how_ended

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")  # a full disk does not reach it
LEAST_FREE = 64 * 2**20  # bytes there; else the usual place for temporary files
FRONT_END_ENDS = ENDING + 5.0  # seconds from Stop
# What front ends allocate with, where the environment does not say: of Python's own allocator a few
# objects that live keep whole arenas, and the memory of large bodies would not be given back.
ALLOCATOR = {"PYTHONMALLOC": "malloc"}


@dataclass(frozen=True)
class Programs:
    """Commands of the children; each gets the descriptor of its channel as its last argument."""

    engine: Sequence[str] = (sys.executable, "-m", "specengine.cli.serve_process")
    front_end: Sequence[str] = (sys.executable, "-m", "specengine.cli.serve_process")


def supervise(config: EngineConfig, num_front_ends: int, programs: Programs | None = None) -> None:
    """Serve until a signal, which is raised again in the end. Raises ConfigError where it cannot
    listen, what kept the engine from being built, and EngineStoppedError where a process ends again
    and again."""
    check_tls(config.server)
    keys = read_keys(config.server)
    check_tracing(config)
    with listen(config.server) as listener:
        place = make_place()
        try:
            supervisor = Supervisor(config, num_front_ends, programs or Programs(), place, keys)
            caught = asyncio.run(supervisor.run(listener))
        finally:
            shutil.rmtree(place, ignore_errors=True)
    if caught is not None:
        signal.raise_signal(caught)


def check_tracing(config: EngineConfig) -> None:
    """Raise ConfigError where the extra is missing, before any process is started."""
    if config.server.otlp_endpoint is None:
        return
    from specengine.server.tracing import otlp_provider  # with FastAPI, which nothing here needs

    provider = otlp_provider(config.server.otlp_endpoint)
    if provider is not None:
        provider.shutdown()


def make_place() -> Path:
    """A directory of this server's own, for sockets and counters."""
    has_room = (
        os.access(SHARED_MEMORY, os.W_OK) and shutil.disk_usage(SHARED_MEMORY).free >= LEAST_FREE
    )
    return Path(tempfile.mkdtemp(prefix="specengine-", dir=SHARED_MEMORY if has_room else None))


@dataclass(eq=False)
class Supervisor:
    config: EngineConfig
    num_front_ends: int
    programs: Programs
    place: Path
    keys: list[str]
    front_ends: list[Child] = field(default_factory=list)
    caught: signal.Signals | None = None

    async def run(self, listener: socket.socket) -> signal.Signals | None:
        """The signal that ended it."""
        self._started = int(time.time())
        self._numbers = count()
        self._ending = asyncio.Event()
        self._hurry = asyncio.Event()
        self._url = address(listener, self.config.server.scheme)
        self.acceptor = Acceptor(
            listener, lambda: self.front_ends, self.config.limits.max_connections
        )
        (self.place / "metrics").mkdir()
        given = self.programs.engine, self.place, self._tell, self._note, self._ending
        self.engines = Engines(self.config, *given)
        loop = asyncio.get_running_loop()
        for one in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(one, self._catch, one)
        logger.info("listening on %s", self._url)
        keepers = [self._watch(), *map(self.engines.keep, self.engines.groups)]
        keepers += [self._keep_front_end() for _ in range(self.num_front_ends)]
        tasks = [asyncio.create_task(one) for one in keepers]
        ending = asyncio.create_task(self._ending.wait())
        try:
            await asyncio.wait({ending, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                await self._drain()
        finally:
            self._ending.set()
            self.acceptor.stop()
            await self._end_children()
            for task in (ending, *tasks):
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        failures = [one for one in results if isinstance(one, Exception)]
        if failures:
            raise failures[0]
        return self.caught

    def _catch(self, caught: signal.Signals) -> None:
        if self.caught is not None:
            self._hurry.set()
        self.caught = caught
        self._ending.set()

    async def _keep_front_end(self) -> None:
        restarts = Restarts(self.config.server.max_restarts)
        variables = {VARIABLE: str(self.place / "metrics")}
        variables |= {name: value for name, value in ALLOCATOR.items() if name not in os.environ}
        while not self._ending.is_set():
            name = f"front-end-{next(self._numbers)}"
            child = await spawn(name, self.programs.front_end, variables, self._note)
            self.front_ends.append(child)
            for part in messages_of(self.keys):
                child.mailbox.send(part)
            given = name, self._started, self.num_front_ends, self.engines.infos
            child.mailbox.send(StartFrontEnd(self.config, *given))
            await self._see_off(child)
            self.front_ends.remove(child)
            self.engines.forget_front_end(name)
            if self._ending.is_set():
                return
            pause = restarts.pause("a front end")
            logger.error("a front end has ended (%s); restart in %.1f s", how_ended(child), pause)
            await asyncio.sleep(pause)

    async def _see_off(self, child: Child) -> None:
        """Until it has ended."""
        await child.process.wait()
        child.mailbox.read()  # what it said last
        child.mailbox.close()

    def _note(self, child: Child, message: Message) -> None:
        child.last_beat = time.monotonic()
        if isinstance(message, Beat):
            child.num_open -= message.num_closed
        elif isinstance(message, Up):
            child.is_up = True
            if not self._ending.is_set() or not child.is_drained:
                self.acceptor.start()
        elif isinstance(message, Serves):
            child.serves = True
        elif isinstance(message, Drained):
            child.is_drained = True
        elif (info := self.engines.note(child, message)) is not None:
            num_ready, count = len(self.engines.infos), len(self.engines.slots)
            which = f", engine {num_ready} of {count}" if count > 1 else ""
            logger.info("%s%s", ready(self._url, info.model_name, info.sampling_defaults), which)

    def _tell(self, message: Message) -> None:
        for one in self.front_ends:
            one.mailbox.send(message)

    async def _watch(self) -> None:
        """Kill what hangs; it is started again then."""
        limit = self.config.server.watchdog_timeout
        while limit and not self._ending.is_set():
            await asyncio.sleep(min(limit / 4, 5.0))
            await self.engines.kill_hanging(limit)
            for one in list(self.front_ends):
                if one.is_up and time.monotonic() - one.last_beat > limit:
                    logger.error("a front end says nothing for %g s: it is killed", limit)
                    await one.kill(tells_why=True)
        await self._ending.wait()

    async def _drain(self) -> None:
        """Requests that run have their time, while new ones are refused."""
        logger.info("stopping")
        self._tell(Drain())
        deadline = time.monotonic() + self.config.server.shutdown_timeout
        while time.monotonic() < deadline and not self._hurry.is_set():
            if all(one.is_drained or not one.is_up for one in self.front_ends):
                return
            await asyncio.sleep(0.05)

    async def _end_children(self) -> None:
        self._tell(Stop())
        ends = [one.end(0.0 if not one.is_up else FRONT_END_ENDS) for one in self.front_ends]
        await asyncio.gather(*ends)
        await self.engines.end()


def is_supported() -> bool:
    """Whether this system has what the processes need to talk."""
    return hasattr(socket, "SOCK_SEQPACKET") and sys.platform == "linux"


def num_workers(asked: int | None, cores: int) -> int:
    """Front ends for a machine of so many cores, unless a number is asked for: half of those that
    the engine leaves, for clients and everything else need some as well."""
    if asked is not None:
        return asked
    return max(1, min((cores - 2) // 2, 8)) if is_supported() else 0


def usable_cores() -> int:
    found: Any = getattr(os, "sched_getaffinity", None)
    return len(found(0)) if found else os.cpu_count() or 1
