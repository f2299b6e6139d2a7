"""The engines of a server: started, watched, and started again."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from specengine.core.config import EngineConfig
from specengine.core.errors import EngineStoppedError, SpecEngineError
from specengine.server.processes.alive import Alive
from specengine.server.processes.channel import (
    EngineDown,
    EngineInfo,
    FrontEndGone,
    LoadFailed,
    Message,
    StartEngine,
    Stop,
)
from specengine.server.processes.children import Child, Restarts, spawn

logger = logging.getLogger(__name__)

ENGINE_ENDS = 10.0  # seconds from Stop
ENGINE_DOWN = "the engine has failed and is being restarted; the server's log says why"
CARDS = "CUDA_VISIBLE_DEVICES"
# Of an engine's: OpenMP's threads sleep while they wait for each other. Where front ends need the
# cores as well, threads that spin take them away from the ones they wait for: on two busy cores a
# linear layer took ten times as long.
SLEEPS = {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}


@dataclass(eq=False)
class EngineSlot:
    """One of the engines, by whatever process it runs."""

    number: int
    child: Child | None = None
    info: EngineInfo | None = None  # while it serves
    alive: Alive | None = None
    alive_file: Path = Path()
    was_ready: bool = False


class Engines:
    """--dp-size of them, each with cards of its own. Those that share experts end together, since
    each waits for the others; any other is started again alone."""

    def __init__(
        self,
        config: EngineConfig,
        program: Sequence[str],
        place: Path,
        tell: Callable[[Message], object],
        hear: Callable[[Child, Message], object],
        ending: asyncio.Event,
    ) -> None:
        """place: of the server's sockets. tell: all front ends. hear: called with what an engine
        says, and is to call `note`. ending: the server stops."""
        self.config, self.program, self.place = config, program, place
        self.tell, self.hear, self.ending = tell, hear, ending
        self.slots = [EngineSlot(number) for number in range(config.parallel.dp_size)]
        self.load_failure: SpecEngineError | None = None
        self._numbers = count()

    @property
    def infos(self) -> list[EngineInfo]:
        """What each engine that serves says of itself."""
        return [one.info for one in self.slots if one.info is not None]

    @property
    def groups(self) -> list[list[EngineSlot]]:
        """Those that end together."""
        if self.config.parallel.enable_dp_attention:
            return [self.slots]
        return [[one] for one in self.slots]

    async def keep(self, group: Sequence[EngineSlot]) -> None:
        """Until the server stops. Raises what kept an engine from being built, and
        EngineStoppedError where one ends again and again."""
        restarts = Restarts(self.config.server.max_restarts)
        while not self.ending.is_set():
            meeting = self._meeting() if len(group) > 1 else ""
            for slot in group:
                await self._start(slot, meeting)
            ended = await self._until_one_ends(group)
            how = how_ended(ended)
            for slot in group:
                self._lose(slot)
            if self.ending.is_set():
                return
            if not all(slot.was_ready for slot in group):
                raise self.load_failure or EngineStoppedError(
                    f"the engine ended while it was loaded ({how}); the log says why"
                )
            pause = restarts.pause("the engine")
            logger.error("%s has ended (%s); restart in %.1f s", ended.name, how, pause)
            await asyncio.sleep(pause)

    def note(self, child: Child, message: Message) -> EngineInfo | None:
        """What an engine says. Gives its information once it serves."""
        if isinstance(message, LoadFailed):
            self.load_failure = message.error()
        if not isinstance(message, EngineInfo):
            return None
        slot = self.slots[message.number]
        slot.info, slot.was_ready = message, True
        slot.alive = Alive(str(slot.alive_file))
        self.tell(message)
        return message

    def forget_front_end(self, name: str) -> None:
        for child in self._children(self.slots):
            child.mailbox.send(FrontEndGone(name))

    async def kill_hanging(self, limit: float) -> None:
        """limit: seconds that a step may take."""
        for slot in self.slots:
            if slot.child is not None and slot.alive is not None and slot.alive.age() > limit:
                logger.error("a step of the engine takes more than %g s: it is killed", limit)
                await slot.child.kill(tells_why=True)

    async def end(self) -> None:
        children = self._children(self.slots)
        for child in children:
            child.mailbox.send(Stop())
        await asyncio.gather(*(child.end(ENGINE_ENDS) for child in children))

    async def _start(self, slot: EngineSlot, meeting: str) -> None:
        number, config, several = next(self._numbers), self.config, len(self.slots) > 1
        parallel = config.parallel
        if several and not meeting:
            config = replace(config, parallel=replace(parallel, dp_size=1))
        cards = cards_of(slot.number, parallel.tp_size)
        variables = SLEEPS | ({CARDS: cards} if several else {})
        name = f"engine {slot.number}" if several else "the engine"
        slot.child = child = await spawn(name, self.program, variables, self.hear)
        slot.alive_file = self.place / f"alive-{number}"
        child.mailbox.send(
            StartEngine(
                config,
                f"ipc://{self.place}/engine-{number}",
                str(slot.alive_file),
                str(self.place / "tokenizer"),
                slot.number,
                meeting,
            )
        )

    async def _until_one_ends(self, group: Sequence[EngineSlot]) -> Child:
        """Gives it; the others of the group are ended then."""
        children = self._children(group)
        waits = {asyncio.create_task(one.process.wait()): one for one in children}
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        first = waits[next(iter(done))]
        if not self.ending.is_set():
            for child in children:
                if child.process.returncode is None:
                    await child.kill()
        await asyncio.gather(*waits)
        for child in children:
            child.mailbox.read()  # what it said last
            child.mailbox.close()
        return first

    def _lose(self, slot: EngineSlot) -> None:
        slot.child = slot.info = slot.alive = None
        message = "the engine is shutting down" if self.ending.is_set() else ENGINE_DOWN
        self.tell(EngineDown(message, slot.number))

    def _meeting(self) -> str:
        place = self.place / f"meeting-{next(self._numbers)}"
        place.mkdir()
        return str(place)

    @staticmethod
    def _children(slots: Sequence[EngineSlot]) -> list[Child]:
        return [one.child for one in slots if one.child is not None]


def cards_of(number: int, tp_size: int) -> str:
    """Of the cards that this process may use, those for the ranks of this engine."""
    given = [one for one in os.environ.get(CARDS, "").split(",") if one]
    places = range(number * tp_size, (number + 1) * tp_size)
    return ",".join(given[one % len(given)] if given else str(one) for one in places)


def how_ended(child: Child) -> str:
    status = child.process.returncode
    if status is not None and status < 0:
        with suppress(ValueError):
            return signal.Signals(-status).name
    return f"status {status}"
