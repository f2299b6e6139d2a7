"""An engine that messages go to and come from, whatever carries them."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from specengine.core.errors import EngineStoppedError, RequestError, SpecEngineError
from specengine.core.sampling import SamplingParams
from specengine.engine.outputs import EngineStats, RequestOutput
from specengine.engine.serving.messages import Request
from specengine.engine.serving.operations import Operations
from specengine.engine.serving.streams import Streams, decode_answer
from specengine.engine.tokens import check_token_ids, is_text
from specengine.server.processes.channel import EngineInfo

ANSWERED = 2.0  # seconds that /metrics waits for an engine that is busy


class DistantEngine(Operations):
    """A ServedEngine, of one event loop. A subclass carries messages: `_carry` sends one, and
    `_streams.receive` takes what comes back."""

    def __init__(self, info: EngineInfo, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._info, self.config = info, info.config
        self.model_name, self.context_length = info.model_name, info.context_length
        self.sampling_defaults, self.is_embedding = info.sampling_defaults, info.is_embedding
        self._end: str | None = None  # why it has ended
        self._stats = EngineStats()
        self._streams = Streams(tokenizer, self._post)

    @abstractmethod
    def _carry(self, message: Request) -> None:
        """Send it; does not wait."""

    @abstractmethod
    def _disconnect(self) -> None:
        """Nothing comes or goes any more."""

    @property
    def is_ready(self) -> bool:
        return self._end is None

    def stats(self) -> EngineStats:
        """The engine's figures at the last `refresh`."""
        return self._stats

    async def refresh(self) -> None:
        """Ask for the counters. Those received last stay where no answer comes in time."""
        try:
            async with asyncio.timeout(ANSWERED):
                answer = await self._streams.ask("stats")
        except (TimeoutError, SpecEngineError):
            return
        self._stats = decode_answer(answer, EngineStats)

    def generate(
        self, prompt_ids: list[int], sampling: SamplingParams, rid: str, stream: bool = True
    ) -> AsyncIterator[RequestOutput]:
        """See AsyncEngine.generate."""
        check_token_ids(prompt_ids, sampling, self._info.vocab_size)
        sendable = self._sendable(sampling)
        return self._streams.generate(prompt_ids, sampling, rid, stream, sendable)

    async def embed(self, prompt_ids: list[int], rid: str) -> list[float]:
        """See AsyncEngine.embed."""
        check_token_ids(prompt_ids, SamplingParams(), self._info.vocab_size)
        return await self._streams.embed(prompt_ids, rid)

    async def operate(self, what: str, **arguments: Any) -> Any:
        return await self._streams.operate(what, **arguments)

    def shutdown(self) -> None:
        """Open requests end with an error; the engine itself goes on."""
        self.end("the engine is shutting down")

    def end(self, message: str) -> None:
        """Nothing more comes from the engine; open requests end with this message."""
        if self._end is not None:
            return
        self._end = message
        self._disconnect()
        self._streams.fail(self._error)

    def _post(self, message: Request) -> None:
        if self._end is not None:
            raise self._error()
        self._carry(message)

    def _error(self) -> EngineStoppedError:
        return EngineStoppedError(self._end or "")

    def _sendable(self, sampling: SamplingParams) -> SamplingParams:
        """The same in the engine, and no number or text beyond what MessagePack can carry."""
        if sampling.grammar is not None and not is_text(sampling.grammar.text):
            param = sampling.grammar.param
            raise RequestError(f"{param} has half a surrogate pair in it, which is no text", param)
        limit, info = sampling.max_tokens, self._info
        steps = sampling.speculative.num_steps
        values: dict[str, Any] = {
            "top_k": min(sampling.top_k, info.vocab_size),
            "max_tokens": None if limit is None else min(limit, info.context_length),
            "min_tokens": min(sampling.min_tokens, info.context_length),
            "stop": tuple(filter(is_text, sampling.stop)),  # others match nothing
        }
        if steps is not None and steps > info.context_length:
            values["speculative"] = replace(sampling.speculative, num_steps=info.context_length)
        others = {name: one for name, one in values.items() if one != getattr(sampling, name)}
        temperature: Any = sampling.temperature
        if not isinstance(temperature, float):
            others["temperature"] = float(temperature)
        return replace(sampling, **others) if others else sampling
