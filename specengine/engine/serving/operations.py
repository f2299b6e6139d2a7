"""The operator's calls of an engine that serves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class Operations(ABC):
    """Calls that become questions to an EngineHost, which answers them between two steps. Each
    raises RequestError where the engine refuses, EngineAsleepError where it has to be woken first,
    and EngineStoppedError where it has ended."""

    @abstractmethod
    async def operate(self, what: str, **arguments: Any) -> Any:
        """The result of one of the operations of EngineHost, which has the name of a method of
        this class."""

    async def give_up(self, names: list[str] | None = None) -> int:
        """End the requests of these names, or all: Engine.give_up."""
        return int(await self.operate("give_up", names=names))

    async def flush_cache(self) -> int:
        """Forget the prefixes that no request holds. Returns their tokens."""
        return int(await self.operate("flush_cache"))

    async def update_weights(self, model: str | None = None, draft_model: str | None = None) -> int:
        """Other weights in place: Engine.update_weights."""
        return int(await self.operate("update_weights", model=model, draft_model=draft_model))

    async def sleep(self, level: int = 1) -> int:
        """Give memory back: Engine.sleep."""
        return int(await self.operate("sleep", level=level))

    async def wake(self) -> None:
        """Take it again: Engine.wake."""
        await self.operate("wake")

    async def is_sleeping(self) -> bool:
        return bool(await self.operate("is_sleeping"))
