"""Processes that a supervisor starts, and how often it starts them again."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic

from specengine.core.errors import EngineStoppedError
from specengine.server.processes.channel import Mailbox, Message, channel_pair

WINDOW = 600.0  # seconds in which restarts are counted
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds before a restart
LAST_WORDS = 2.0  # seconds that a process has to write its stack traces


@dataclass(eq=False)
class Child:
    """A process and the channel to it. is_up: it takes connections. serves: requests as well.
    num_open: connections that it has."""

    name: str
    process: asyncio.subprocess.Process
    mailbox: Mailbox = field(init=False)
    is_up: bool = False
    serves: bool = False
    is_drained: bool = False
    num_open: int = 0
    last_beat: float = field(default_factory=monotonic)

    def gone(self) -> None:
        """Its side of the channel has closed: it gets no further connection, though its end is
        noticed later."""
        self.is_up = False

    async def kill(self, tells_why: bool = False) -> None:
        """tells_why: it hangs; where it still can, it writes where."""
        with suppress(ProcessLookupError):
            if tells_why:
                self.process.send_signal(signal.SIGABRT)  # faulthandler writes the stacks
                with suppress(TimeoutError):
                    async with asyncio.timeout(LAST_WORDS):
                        await self.process.wait()
            self.process.kill()

    async def end(self, seconds: float) -> None:
        """Wait for it, then kill it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.process.wait()
        await self.kill()
        await self.process.wait()


async def spawn(
    name: str,
    command: Sequence[str],
    variables: dict[str, str],
    hear: Callable[[Child, Message], object],
) -> Child:
    """command: it gets the descriptor of its channel as its last argument. hear: called with what
    it says."""
    channel, theirs = channel_pair()
    with theirs:
        descriptor = theirs.fileno()
        process = await asyncio.create_subprocess_exec(
            *command,
            str(descriptor),
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=[descriptor],
            start_new_session=True,  # a Ctrl-C at the terminal is for the supervisor
            env=os.environ | variables | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
    child = Child(name, process)
    child.mailbox = channel.watched(lambda received: hear(child, received.message), child.gone)
    return child


class Restarts:
    """Longer and longer pauses, and an end: what fails at once each time will not get better."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._times: deque[float] = deque()

    def pause(self, what: str) -> float:
        """Seconds before `what` is started again. EngineStoppedError where that was tried too
        often."""
        now = monotonic()
        while self._times and now - self._times[0] > WINDOW:
            self._times.popleft()
        if len(self._times) >= self._most:
            raise EngineStoppedError(
                f"{what} has ended {len(self._times) + 1} times within {WINDOW / 60:.0f} minutes; "
                "the log says why (--max-restarts)"
            )
        self._times.append(now)
        seconds: float = FIRST_PAUSE * 2.0 ** (len(self._times) - 1)
        return min(seconds, LONGEST_PAUSE)
