"""The two ends of the link by which rank 0 sends calls to the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol

from specengine.core.config import EngineConfig, ServerConfig
from specengine.core.errors import EngineStoppedError
from specengine.core.parallel import Communicator
from specengine.engine.parallel.messages import Build, Decided, Drop, Load, Message, decode, encode
from specengine.engine.parallel.ring import Ring


class Watch(Protocol):
    """The processes of the other ranks (ranks.py)."""

    when_failed: list[Callable[[], object]]

    def check(self) -> None:
        """Raises EngineStoppedError where one has ended."""
        ...

    def named(self) -> AbstractContextManager[None]:
        """What fails inside because one has ended says so."""
        ...

    def end(self) -> None:
        """End them all. Nothing runs there any more."""
        ...


class LeadLink:
    """Rank 0's end: a ring to each of the others."""

    leads = True

    def __init__(self, communicator: Communicator, rings: Sequence[Ring], watch: Watch) -> None:
        self.communicator = communicator
        self.watch = watch
        self.num_engines = 0
        self.dropped: list[int] = []  # engines that are gone here, and not yet there
        self._rings = rings

    def load(self, config: EngineConfig) -> None:
        """The others read the weights, too."""
        self.tell(Load(_told(config)))

    def build(self, config: EngineConfig) -> None:
        """The others build an engine, too, which has the next number."""
        self.num_engines += 1
        self.tell(Build(self.num_engines, _told(config)))

    def tell(self, message: Message) -> None:
        """Raises EngineStoppedError where a rank has ended."""
        self.watch.check()
        while self.dropped:
            self._write(Drop(self.dropped.pop()))
        self._write(message)

    def decide(self, make: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
        numbers = make()
        self._write(Decided([*numbers]))
        return numbers

    def _write(self, message: Message) -> None:
        data = encode(message)
        for ring in self._rings:
            ring.write(data, self.watch.check)


class FollowerLink:
    """The end of another rank."""

    leads = False

    def __init__(self, communicator: Communicator, ring: Ring) -> None:
        self.communicator = communicator
        self._ring = ring

    def load(self, config: EngineConfig) -> None: ...

    def build(self, config: EngineConfig) -> None: ...

    def next(self) -> Message:
        return decode(self._ring.read(lambda: None))

    def decide(self, make: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
        message = self.next()
        if not isinstance(message, Decided):
            rank = self.communicator.rank
            raise EngineStoppedError(
                f"rank {rank} waits for a decision, and rank 0 says {type(message).__name__}: "
                "ranks have parted, which is a bug in the engine"
            )
        return tuple(message.numbers)


def _told(config: EngineConfig) -> EngineConfig:
    """What another rank may know: not the server's keys. Nor has it a file of costs, by which rank
    0 alone chooses."""
    server = ServerConfig(log_level=config.server.log_level)
    return replace(config, server=server, spec=replace(config.spec, cost_table=None))
