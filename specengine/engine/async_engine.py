"""The engine behind asyncio: one background thread steps, callers iterate over outputs."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from specengine.core.config import EngineConfig
from specengine.core.errors import EngineStoppedError, SpecEngineError
from specengine.core.sampling import SamplingParams
from specengine.engine.background_capture import QuietTime
from specengine.engine.grammar.pool import GrammarPool
from specengine.engine.grammar.state import LlguidanceState
from specengine.engine.loop import Engine
from specengine.engine.outputs import EngineStats, RequestOutput

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Caller:
    """Where the outputs of one request go. `queue` belongs to the event loop `loop`."""

    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[RequestOutput | Exception]
    open_choices: int


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
        queue: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()
        caller = Caller(asyncio.get_running_loop(), queue, sampling.n)
        self._post(lambda: self._add(rid, prompt_ids, sampling, caller, stream, grammar))
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

    def _add(
        self,
        rid: str,
        prompt_ids: list[int],
        sampling: SamplingParams,
        caller: Caller,
        stream: bool,
        grammar: LlguidanceState | None,
    ) -> None:
        try:
            self._engine.add_request(rid, prompt_ids, sampling, stream, grammar)
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
            if caller is not None:
                self._send(caller, output)

    def _send(self, caller: Caller, item: RequestOutput | Exception) -> None:
        try:
            caller.loop.call_soon_threadsafe(caller.queue.put_nowait, item)
        except RuntimeError:  # the caller's event loop is closed: nobody is left to read
            logger.debug("dropped an output: the event loop of its caller is closed")
