"""The processes of the other ranks: started, watched, ended."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch

from specengine.core.config import EngineConfig
from specengine.core.errors import ConfigError, EngineStoppedError
from specengine.core.parallel import FAILED_EXIT, Link, NoLink
from specengine.core.platform import platform_of
from specengine.engine.parallel.ring import Ring
from specengine.engine.phases import Phases
from specengine.engine.resolve import resolve_device
from specengine.engine.sharing import Meeting

logger = logging.getLogger(__name__)

PROGRAM = "specengine.engine.parallel.program"
_EVERY = 0.1  # seconds between looks at the processes
_GRACE = 3.0  # seconds for collectives to be aborted, and then for the engine to say so
_TO_END = 5.0  # seconds that a rank has to end by itself


def start_ranks(config: EngineConfig, phases: Phases, meeting: Meeting | None = None) -> Link:
    """Those beside this process, which is rank 0; NoLink for --tp-size 1. meeting: of engines that
    share experts, where each rank calls sharing.meet next. Raises ConfigError for want of devices,
    EngineStoppedError where one does not come up."""
    size, device = config.parallel.tp_size, resolve_device(config.model.device)
    if size == 1:
        return NoLink()
    check_ranks(config, device)
    # What engines of one rank do without.
    from torch._C._distributed_c10d import FileStore

    from specengine.engine.parallel.links import LeadLink
    from specengine.runner.communicators.connect import connect
    from specengine.runner.communicators.host_memory import HostMemoryCommunicator

    with phases.phase(f"start {size - 1} more ranks"):
        before, threads = torch.get_num_threads(), _threads(device, size)
        # Ranks meet in a folder that is this user's alone: a TCPStore would accept connections from
        # anyone.
        folder = tempfile.TemporaryDirectory(prefix="specengine-ranks-")
        store = FileStore(f"{folder.name}/store", size)
        rings = [Ring.create() for _ in range(size - 1)]
        symmetric = config.sums_in_one_kernel
        is_accelerator = platform_of(device).is_accelerator
        shared = None if is_accelerator else HostMemoryCommunicator.create(size)
        given: dict[str, Any] = {"size": size, "folder": folder.name, "device": device.type}
        given |= {"threads": threads, "log_level": config.server.log_level, "symm_mem": symmetric}
        given |= {"meeting": None if meeting is None else asdict(meeting)}
        given |= {"memory": None if shared is None else shared.file}
        started = [
            _start(ring, {"rank": rank, "ring": ring.file, **given})
            for rank, ring in enumerate(rings, start=1)
        ]
        ranks = Ranks(started, before)
        ranks.wait_for(lambda: store.check([f"up {rank}" for rank in range(1, size)]))
        communicator = shared or connect(store, 0, size, device, symmetric)
        weakref.finalize(ranks, folder.cleanup)
        ranks.when_failed.append(folder.cleanup)
        ranks.abort = communicator.abort
    link = LeadLink(communicator, rings, ranks)
    ranks.ends_with(link)
    return link


def check_ranks(config: EngineConfig, device: torch.device) -> None:
    """Raises ConfigError where there are too few devices for a rank each."""
    size, platform = config.parallel.tp_size, platform_of(device)
    if platform.is_accelerator and size > platform.num_devices():
        raise ConfigError(
            f"--tp-size {size}: PyTorch sees {platform.num_devices()} {device.type.upper()} "
            "devices, and each rank needs one"
        )


class Ranks:
    """A links.Watch. A thread looks at the processes; when one has ended, it ends the others, and
    this process too where that waits for it and cannot be notified."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]], threads: int) -> None:
        """threads: of PyTorch in this process, once they have ended."""
        self.failure: str | None = None
        self.abort: Callable[[], None] = lambda: None  # collectives that wait for a rank
        self.when_failed: list[Callable[[], object]] = []
        self._processes = processes
        self._waiting = 0  # calls of the engine that run
        self._ended = threading.Event()
        self._aborted = threading.Event()  # a process that ends amid an abort dumps its core
        self._stop = weakref.finalize(self, _end, processes, self._ended, threads)
        watching = threading.Thread(target=_watch, args=(weakref.ref(self), self._ended))
        watching.daemon = True
        watching.start()

    @property
    def pids(self) -> list[int]:
        return [one.pid for one in self._processes]

    def ends_with(self, owner: object) -> None:
        weakref.finalize(owner, self._stop)

    def check(self) -> None:
        if self.failure is not None:
            self._aborted.wait(_GRACE)
            raise EngineStoppedError(self.failure)
        if self._ended.is_set():
            raise EngineStoppedError("the ranks of this engine have ended")

    @contextmanager
    def named(self) -> Iterator[None]:
        """What fails inside because a rank has ended says so."""
        self._waiting += 1
        try:
            yield
        except RuntimeError as error:
            time.sleep(3 * _EVERY)
            if self.failure is not None:
                self._aborted.wait(_GRACE)
                raise EngineStoppedError(self.failure) from error
            raise
        finally:
            self._waiting -= 1

    def wait_for(self, is_up: Callable[[], bool]) -> None:
        """Raises EngineStoppedError where a rank ends instead."""
        while not is_up():
            self.check()
            time.sleep(_EVERY)

    def end(self) -> None:
        self._stop()

    def look(self) -> None:
        """Called again and again by the watching thread."""
        for rank, process in enumerate(self._processes, start=1):
            code = process.poll()
            if code is not None and self.failure is None and not self._ended.is_set():
                self._fail(rank, code)

    def _fail(self, rank: int, code: int) -> None:
        how = f"was killed by signal {-code}" if code < 0 else f"has ended with code {code}"
        self.failure = f"rank {rank} {how}, and so has the engine; the log says more"
        logger.error("%s", self.failure)
        for process in self._processes:
            process.kill()
        self._abort()
        for tell in self.when_failed:
            tell()
        deadline = time.monotonic() + _GRACE
        while self._waiting and time.monotonic() < deadline:
            time.sleep(_EVERY)
        if self._waiting:  # in a collective that nothing ends
            print(f"specengine: {self.failure}", file=sys.stderr, flush=True)
            os._exit(FAILED_EXIT)

    def _abort(self) -> None:
        """What takes longer goes on beside."""
        aborting = threading.Thread(target=self.abort, daemon=True)
        aborting.start()
        aborting.join(_GRACE)
        self._aborted.set()


def _watch(ranks_of: weakref.ref[Ranks], ended: threading.Event) -> None:
    while not ended.wait(_EVERY):
        ranks = ranks_of()
        if ranks is None:
            return
        ranks.look()
        del ranks


def _end(
    processes: Sequence[subprocess.Popen[bytes]], ended: threading.Event, threads: int
) -> None:
    """A closed stdin ends a rank."""
    ended.set()
    torch.set_num_threads(threads)
    for process in processes:
        if process.stdin is not None:
            process.stdin.close()
    deadline = time.monotonic() + _TO_END
    for process in processes:
        try:
            process.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _threads(device: torch.device, size: int) -> int | None:
    """Threads of each rank, this one among them, where ranks share a CPU: as many as this process
    has, as far as there are cores for all. None where they do not share one."""
    if platform_of(device).is_accelerator:
        return None
    share = max(1, len(os.sched_getaffinity(0)) // size)
    threads = min(share, torch.get_num_threads())
    torch.set_num_threads(threads)
    return threads


def _start(ring: Ring, given: dict[str, Any]) -> subprocess.Popen[bytes]:
    """The program takes what it needs from the first line of its stdin."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(one for one in sys.path if one)}
    if given["threads"] is not None:
        environment["OMP_NUM_THREADS"] = str(given["threads"])
    process = subprocess.Popen(
        [sys.executable, "-m", PROGRAM],
        stdin=subprocess.PIPE,
        env=environment,
        pass_fds=[one for one in (ring.file, given["memory"]) if one is not None],
        start_new_session=True,  # signals of a terminal are for rank 0
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(given).encode() + b"\n")
    process.stdin.flush()
    return process
