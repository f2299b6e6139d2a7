"""The engine behind asyncio: one background thread steps, callers iterate over outputs."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from functools import partial
from typing import Any, TypeVar

from specengine.core.errors import EngineStoppedError
from specengine.core.sampling import SamplingParams
from specengine.engine.background_capture import QuietTime
from specengine.engine.loop import Engine
from specengine.engine.outputs import EngineStats, RequestOutput
from specengine.engine.serving.host import EngineHost
from specengine.engine.serving.messages import Reply, Request
from specengine.engine.serving.operations import Operations
from specengine.engine.serving.streams import Streams

logger = logging.getLogger(__name__)
T = TypeVar("T")


class AsyncEngine(Operations):
    """Every call into the Engine is made by the engine thread. Each event loop that calls it has
    its own Streams."""

    def __init__(
        self,
        engine: Engine,
        prepares: bool = False,
        quiet: QuietTime | None = None,
        interval: float = 0.0,
    ) -> None:
        """prepares, quiet, interval: see EngineHost."""
        self._engine, parts = engine, engine.parts
        self.tokenizer, self.config = parts.tokenizer, parts.config
        self.model_name, self.context_length = parts.model_name, parts.context_length
        self.sampling_defaults = parts.sampling_defaults
        self.is_embedding = parts.pooling is not None  # it makes vectors, not text
        self._wake = threading.Event()
        self._host = EngineHost(
            engine, self._wake.set, self._wake.is_set, prepares, quiet, interval
        )
        self._streams: dict[asyncio.AbstractEventLoop, Streams] = {}
        self._lock = threading.Lock()
        self._stopped = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        return not self._stopped and self._failure is None and self._thread.is_alive()

    def stats(self) -> EngineStats:
        """Counters as of the last step; read without a lock, each number by itself is right."""
        return self._engine.stats()

    async def refresh(self) -> None:
        """Brings `stats` up to date, which here it always is."""

    async def generate(
        self, prompt_ids: list[int], sampling: SamplingParams, rid: str, stream: bool = True
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of every choice as they come, or only when it has ended. Closing the iterator
        early aborts the request.

        Raises RequestError or QueueFullError where it cannot be served.
        """
        loop = asyncio.get_running_loop()
        outputs: Any = self._streams_of(loop).generate(prompt_ids, sampling, rid, stream)
        try:
            async for output in outputs:
                yield output
        finally:
            await outputs.aclose()
            self._release(loop)

    async def embed(self, prompt_ids: list[int], rid: str) -> list[float]:
        """The vector of a prompt. Raises RequestError or QueueFullError where it cannot be had."""
        return await self._with_streams(lambda streams: streams.embed(prompt_ids, rid))

    async def operate(self, what: str, **arguments: Any) -> Any:
        return await self._with_streams(lambda streams: streams.operate(what, **arguments))

    async def _with_streams(self, call: Callable[[Streams], Awaitable[T]]) -> T:
        loop = asyncio.get_running_loop()
        try:
            return await call(self._streams_of(loop))
        finally:
            self._release(loop)

    def connect(self, key: Hashable, send: Callable[[Reply], bool]) -> None:
        """For callers that speak in messages: `send` is called in the engine's thread with the
        replies to what they `tell`. See EngineHost."""
        self._host.post(lambda: self._host.connect(key, send))

    def tell(self, key: Hashable, message: Request) -> None:
        """Raises EngineStoppedError."""
        if not self.is_ready:
            raise self._end()
        self._host.post(lambda: self._host.receive(key, message))

    def disconnect(self, key: Hashable) -> None:
        """Its open requests end."""
        self._host.post(lambda: self._host.disconnect(key))

    def shutdown(self) -> None:
        """Stop the thread; requests in flight end with an error."""
        self._stopped = True
        self._wake.set()
        self._thread.join()
        self._host.close()

    def _streams_of(self, loop: asyncio.AbstractEventLoop) -> Streams:
        with self._lock:
            streams = self._streams.get(loop)
            if streams is None:
                streams = Streams(self.tokenizer, partial(self.tell, loop))
                self._streams[loop] = streams
                self.connect(loop, self._sender(loop, streams))
            return streams

    def _release(self, loop: asyncio.AbstractEventLoop) -> None:
        """The last request of a loop: it may be closed soon."""
        with self._lock:
            streams = self._streams.get(loop)
            if streams is not None and streams.is_idle:
                del self._streams[loop]
                self.disconnect(loop)

    def _sender(self, loop: asyncio.AbstractEventLoop, streams: Streams) -> Any:
        def send(reply: Reply) -> bool:
            try:
                loop.call_soon_threadsafe(streams.receive, reply)
            except RuntimeError:  # the loop is closed, and its caller gone
                logger.debug("dropped a message: the event loop of its caller is closed")
            return True

        return send

    def _run(self) -> None:
        try:
            while True:
                self._wake.clear()  # a stop sets _stopped first, and then _wake
                if self._stopped:
                    break
                seconds = self._host.turn()
                if seconds != 0.0:
                    self._wake.wait(seconds)
        except Exception as error:
            logger.exception("the engine thread failed")
            self._failure = error
        with self._lock:
            open_streams = list(self._streams.items())
        for loop, streams in open_streams:
            try:
                loop.call_soon_threadsafe(streams.fail, self._end)
            except RuntimeError:
                logger.debug("the event loop of a caller is closed")

    def _end(self) -> EngineStoppedError:
        why = "is shutting down" if self._failure is None else "has failed; its log says why"
        return EngineStoppedError(f"the engine {why}")
