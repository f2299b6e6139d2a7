"""Several engines of one model, as one: each request goes to the replica that `routing` chooses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import chain, zip_longest
from typing import Any, TypeVar

from specengine.core.config import EngineConfig
from specengine.core.errors import EngineStoppedError
from specengine.core.sampling import SamplingParams
from specengine.core.spec_stats import DepthChoice
from specengine.engine.outputs import EngineStats, RequestOutput
from specengine.scheduler.split_policy import SplitDecision
from specengine.server.routing import PrefixRouter
from specengine.server.service import ServedEngine
from specengine.server.streaming import closing

T = TypeVar("T")


class Replicas:
    """A ServedEngine. engines: of the same model and configuration; at least one. Requests of a
    replica that fails fail with it; later ones go to the others."""

    def __init__(self, engines: Sequence[ServedEngine]) -> None:
        self.engines = list(engines)
        self.router = PrefixRouter(len(self.engines), self.config.memory.page_size)

    @property
    def tokenizer(self) -> Any:
        return self.engines[0].tokenizer

    @property
    def config(self) -> EngineConfig:
        return self.engines[0].config

    @property
    def model_name(self) -> str:
        return self.engines[0].model_name

    @property
    def context_length(self) -> int:
        return self.engines[0].context_length

    @property
    def sampling_defaults(self) -> dict[str, float]:
        return self.engines[0].sampling_defaults

    @property
    def is_embedding(self) -> bool:
        return self.engines[0].is_embedding

    @property
    def is_ready(self) -> bool:
        """One replica is enough."""
        return bool(self._able())

    def replace(self, number: int, engine: ServedEngine) -> None:
        """By one that was started in its place, whose cache is empty."""
        self.engines[number] = engine
        self.router.forget(number)

    async def generate(
        self, prompt_ids: list[int], sampling: SamplingParams, rid: str, stream: bool = True
    ) -> AsyncIterator[RequestOutput]:
        """See ServedEngine."""
        chosen = self._choose(prompt_ids)
        try:
            outputs = self.engines[chosen].generate(prompt_ids, sampling, rid, stream)
            async with closing(outputs) as found:
                async for output in found:
                    yield output
        finally:
            self.router.finish(chosen)

    async def embed(self, prompt_ids: list[int], rid: str) -> list[float]:
        """See ServedEngine."""
        chosen = self._choose(prompt_ids)
        try:
            return await self.engines[chosen].embed(prompt_ids, rid)
        finally:
            self.router.finish(chosen)

    async def give_up(self, names: list[str] | None = None) -> int:
        """See ServedEngine."""
        return sum(await asyncio.gather(*(one.give_up(names) for one in self._able_engines())))

    async def flush_cache(self) -> int:
        """See ServedEngine."""
        for number in range(len(self.engines)):
            self.router.forget(number)
        return sum(await asyncio.gather(*(one.flush_cache() for one in self._able_engines())))

    async def update_weights(self, model: str | None = None, draft_model: str | None = None) -> int:
        """See ServedEngine. One replica after the other; where one refuses, those before it have
        the new weights already. Those that share experts take them together, all or none."""
        for number in range(len(self.engines)):
            self.router.forget(number)
        return sum(await self._ask_all(lambda one: one.update_weights(model, draft_model)))

    async def sleep(self, level: int = 1) -> int:
        """See ServedEngine. One replica after the other; where one refuses, those before it sleep
        already. Those that share experts sleep together, all or none."""
        for number in range(len(self.engines)):
            self.router.forget(number)
        return sum(await self._ask_all(lambda one: one.sleep(level)))

    async def wake(self) -> None:
        """See ServedEngine."""
        await self._ask_all(lambda one: one.wake())

    async def _ask_all(self, ask: Callable[[ServedEngine], Awaitable[T]]) -> list[T]:
        """Answers of the engines. Engines that share experts wait for each other: they are asked at
        once, and only where all serve."""
        able = self._able_engines()
        if not self.config.parallel.enable_dp_attention:
            return [await ask(one) for one in able]
        if len(able) < len(self.engines):
            raise EngineStoppedError("not all engines that share experts serve; ask again later")
        found = await asyncio.gather(*map(ask, able), return_exceptions=True)
        answers = [one for one in found if not isinstance(one, BaseException)]
        for one in found:
            if isinstance(one, BaseException):
                raise one
        return answers

    async def is_sleeping(self) -> bool:
        """Whether any does: requests may meet it."""
        return any([await one.is_sleeping() for one in self._able_engines()])

    def stats(self) -> EngineStats:
        """Sums over the replicas; the choice of depth is the first one's."""
        return added([one.stats() for one in self.engines])

    async def refresh(self) -> None:
        await asyncio.gather(*(one.refresh() for one in self._able_engines()))

    def shutdown(self) -> None:
        for one in self.engines:
            one.shutdown()

    def _choose(self, prompt_ids: list[int]) -> int:
        able = self._able()
        if not able:
            raise EngineStoppedError("no replica serves; the server's log says why")
        return self.router.choose(prompt_ids, able)

    def _able(self) -> list[int]:
        return [number for number, one in enumerate(self.engines) if one.is_ready]

    def _able_engines(self) -> list[ServedEngine]:
        return [self.engines[number] for number in self._able()]


def added(stats: Sequence[EngineStats]) -> EngineStats:
    """Counters and gauges are summed. What is no number, and what was decided, is the first one's
    that has it."""
    total: EngineStats = _sum(stats)
    return total


def _sum(values: Sequence[Any]) -> Any:
    """Every field of every dataclass is summed, but for decisions: a counter that is added later is
    not forgotten."""
    values = [one for one in values if one is not None]
    if not values:
        return None
    first = values[0]
    if isinstance(first, bool | DepthChoice | SplitDecision):
        return first
    if isinstance(first, int | float):
        return sum(values)
    if isinstance(first, list):
        return [sum(numbers) for numbers in zip_longest(*values, fillvalue=0)]
    if isinstance(first, dict):
        keys = dict.fromkeys(chain.from_iterable(values))
        return {key: _sum([one.get(key) for one in values]) for key in keys}
    if is_dataclass(first) and not isinstance(first, type):
        names = [one.name for one in fields(first)]
        return replace(first, **{name: _sum([getattr(v, name) for v in values]) for name in names})
    return first
