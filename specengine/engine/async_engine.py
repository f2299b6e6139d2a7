"""The engine behind asyncio: one background thread steps, callers iterate over outputs."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from specengine.core.config import EngineConfig
from specengine.core.errors import EngineStoppedError, RequestError, SpecEngineError
from specengine.core.sampling import SamplingParams
from specengine.engine.background_capture import QuietTime
from specengine.engine.grammar.pool import GrammarPool
from specengine.engine.loop import Engine
from specengine.engine.outputs import EngineStats, RequestOutput

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(eq=False)
class Caller:
    """Where the outputs of one request go. `queue` belongs to the event loop `loop`."""

    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[RequestOutput | Exception]
    open_choices: int  # as far as it has read
    running_choices: int  # as far as it has been sent


class AsyncEngine:
    """Every call into the Engine is made by the engine thread; other threads post commands."""

    def __init__(
        self, engine: Engine, prepares: bool = False, quiet: QuietTime | None = None
    ) -> None:
        """prepares: capture graphs while there is no work. Only where nothing else in the process
        uses the device: beside a capture nobody may wait for it or give memory back to it.
        quiet: how long there must have been no request before."""
        self._engine = engine
        self._prepares = prepares
        self._quiet = quiet or QuietTime()
        self._grammars: GrammarPool | None = None
        self._callers: dict[str, Caller] = {}
        self._answers: dict[asyncio.Future[Any], asyncio.AbstractEventLoop] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._stopped = False
        self._failure: Exception | None = None
        engine.call_if_stopped(self._wake.set)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def tokenizer(self) -> Any:
        return self._engine.parts.tokenizer

    @property
    def config(self) -> EngineConfig:
        return self._engine.parts.config

    @property
    def model_name(self) -> str:
        return self._engine.parts.model_name

    @property
    def context_length(self) -> int:
        return self._engine.parts.context_length

    @property
    def is_embedding(self) -> bool:
        """It makes vectors, not text."""
        return self._engine.parts.pooling is not None

    @property
    def is_ready(self) -> bool:
        return not self._stopped and self._failure is None and self._thread.is_alive()

    def stats(self) -> EngineStats:
        """Counters as of the last step; read without a lock, each number by itself is right."""
        return self._engine.stats()

    async def generate(
        self, prompt_ids: list[int], sampling: SamplingParams, rid: str, stream: bool = True
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of every choice as they come, or only when it has ended. Closing the iterator
        early aborts the request.

        Raises RequestError or QueueFullError where it cannot be served.
        """
        grammar = None if sampling.grammar is None else await self._pool().start(sampling.grammar)

        def add() -> None:
            self._engine.add_request(rid, prompt_ids, sampling, stream, grammar)

        async with aclosing(self._outputs(rid, sampling.n, add)) as outputs:
            async for output in outputs:
                yield output

    async def embed(self, prompt_ids: list[int], rid: str) -> list[float]:
        """The vector of a prompt. Raises RequestError or QueueFullError where it cannot be had."""

        def add() -> None:
            self._engine.add_embedding(rid, prompt_ids)

        async with aclosing(self._outputs(rid, 1, add)) as outputs:
            async for output in outputs:
                if output.embedding is not None:
                    return output.embedding
        raise RequestError("the engine gave this request up")

    async def _outputs(
        self, rid: str, num_choices: int, add: Callable[[], None]
    ) -> AsyncGenerator[RequestOutput, None]:
        """What comes of the request that `add` queues, on the engine's thread."""
        queue: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()
        caller = Caller(asyncio.get_running_loop(), queue, num_choices, num_choices)
        self._post(lambda: self._add(rid, caller, add))
        try:
            while caller.open_choices:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item.finish_reason is not None:
                    caller.open_choices -= 1
                yield item
        finally:
            if caller.open_choices and self.is_ready:
                self._post(lambda: self._abort(rid))

    async def give_up(self, names: list[str] | None = None) -> int:
        """End the requests of these names, or all: Engine.give_up."""

        def end() -> int:
            count = self._engine.give_up(names)
            self._deliver(self._engine.take_outputs())
            return count

        return await self._call(end)

    async def flush_cache(self) -> int:
        """Forget the prefixes that no request holds. Returns their tokens."""
        return await self._call(self._engine.flush_cache)

    def shutdown(self) -> None:
        """Stop the thread; requests in flight end with an error."""
        self._stopped = True
        self._wake.set()
        if self._grammars is not None:
            self._grammars.close()
        self._thread.join()
        self._engine.close()

    def _pool(self) -> GrammarPool:
        """Of the first grammar on: most engines meet none."""
        if self._grammars is None:
            self._grammars = GrammarPool(self._engine.parts.grammars, self.config.limits)
        return self._grammars

    def _post(self, command: Callable[[], None]) -> None:
        if not self.is_ready:
            raise self._end()
        self._commands.append(command)
        self._wake.set()

    async def _call(self, command: Callable[[], T]) -> T:
        """What `command` gives on the engine's thread."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                value = command()
            except SpecEngineError as error:
                self._settle(loop, answer, error)
            else:
                self._settle(loop, answer, value)

        self._answers[answer] = loop
        try:
            self._post(run)
            return await answer
        finally:
            self._answers.pop(answer, None)

    def _settle(
        self, loop: asyncio.AbstractEventLoop, answer: asyncio.Future[Any], value: Any
    ) -> None:
        """Have `answer`, which is waited for on `loop`, give a value or raise an error."""

        def settle() -> None:
            if answer.done():  # nobody waits any more
                return
            if isinstance(value, Exception):
                answer.set_exception(value)
            else:
                answer.set_result(value)

        self._call_on(loop, settle)

    def _add(self, rid: str, caller: Caller, add: Callable[[], None]) -> None:
        try:
            add()
            self._callers[rid] = caller
        except SpecEngineError as error:
            self._send(caller, error)

    def _abort(self, rid: str) -> None:
        self._engine.abort(rid)
        self._callers.pop(rid, None)

    def _run(self) -> None:
        try:
            while True:
                self._wake.clear()  # whoever stops the thread wakes it behind that
                if self._stopped:
                    break
                self._engine.check()
                while self._commands:
                    self._commands.popleft()()
                    self._quiet.restart()
                if self._engine.has_work:
                    self._deliver(self._engine.step())
                    self._quiet.restart()
                else:
                    self._pause()
        except Exception as error:
            logger.exception("the engine thread failed")
            self._failure = error
        for caller in self._callers.values():
            self._send(caller, self._end())
        for answer, loop in list(self._answers.items()):
            self._settle(loop, answer, self._end())

    def _end(self) -> EngineStoppedError:
        why = "is shutting down" if self._failure is None else "has failed; its log says why"
        return EngineStoppedError(f"the engine {why}")

    def _pause(self) -> None:
        """There is no work: prepare some, or wait."""
        left = self._quiet.left if self._prepares else 0.0
        goes_on = self._prepares and self._engine.use_idle_moment(not left, self._wake.is_set)
        if not goes_on:
            self._wake.wait(left or None)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            caller = self._callers.get(output.rid)
            if caller is None:
                continue
            caller.running_choices -= output.finish_reason is not None
            if not caller.running_choices:
                del self._callers[output.rid]
            self._send(caller, output)

    def _send(self, caller: Caller, item: RequestOutput | Exception) -> None:
        self._call_on(caller.loop, lambda: caller.queue.put_nowait(item))

    def _call_on(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        try:
            loop.call_soon_threadsafe(call)
        except RuntimeError:  # the caller's event loop is closed: nobody is left to read
            logger.debug("dropped an answer: the event loop of its caller is closed")
