"""The engine's side: requests come in, the engine steps, and what was gained goes out."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any

import msgspec

from specengine.core.errors import RequestError, SpecEngineError
from specengine.engine.background_capture import QuietTime
from specengine.engine.grammar.pool import GrammarJob, GrammarPool
from specengine.engine.grammar.state import LlguidanceState
from specengine.engine.loop import Engine
from specengine.engine.outgoing import Choice
from specengine.engine.serving.messages import Abort, Answer, Ask, Generate, Refused, Request
from specengine.engine.serving.outbox import Outbox, Send

logger = logging.getLogger(__name__)

BLOCKED = 0.005  # seconds until a front end that takes nothing is tried again


@dataclass(eq=False)
class FrontEnd:
    """One of those who ask, and what it waits for, by the stream of the first choice."""

    outbox: Outbox
    requests: dict[int, Open] = field(default_factory=dict)


@dataclass(eq=False)
class Open:
    """A request that has not ended."""

    front: FrontEnd
    rid: str
    streams: range
    num_open: int  # choices
    grammar: GrammarJob | None = None  # while it is compiled


class EngineHost:
    """Every call is made by one thread, but `post`, which any thread may call.

    wake: called after each `post`; ends the wait between two turns. is_wanted: whether a message
    waits, asked amid a capture, which then ends early. prepares: capture graphs while
    there is no work. Only where nothing else in the process uses the device: beside a capture
    no thread may wait for it or give memory back to it. quiet: how long there must have been no
    request before. interval: see Outbox.
    """

    def __init__(
        self,
        engine: Engine,
        wake: Callable[[], object],
        is_wanted: Callable[[], bool],
        prepares: bool = False,
        quiet: QuietTime | None = None,
        interval: float = 0.0,
    ) -> None:
        self._engine = engine
        engine.call_if_stopped(wake)
        self._wake = wake
        self._is_wanted = is_wanted
        self._prepares = prepares
        self._quiet = quiet or QuietTime()
        self._interval = interval
        self._grammars: GrammarPool | None = None
        self._commands: deque[Callable[[], object]] = deque()
        self._fronts: dict[Hashable, FrontEnd] = {}
        self._open: dict[str, Open] = {}
        self._operations: dict[str, Callable[..., Any]] = {
            "stats": lambda: engine.stats(),
            "give_up": lambda names: engine.give_up(names),
            "flush_cache": lambda: engine.flush_cache(),
            "update_weights": lambda model, draft_model: engine.update_weights(model, draft_model),
            "sleep": lambda level: engine.sleep(level),
            "wake": lambda: engine.wake(),
            "is_sleeping": lambda: engine.sleeper.is_asleep,
        }

    def post(self, command: Callable[[], object]) -> None:
        """Run it before the next step."""
        self._commands.append(command)
        self._wake()

    def connect(self, key: Hashable, send: Send) -> None:
        """A front end that may ask from now on."""
        self._fronts[key] = FrontEnd(Outbox(send, self._interval))

    def disconnect(self, key: Hashable) -> None:
        """It has gone: what it waited for ends, and its KV is free. Unknown ones are ignored."""
        front = self._fronts.pop(key, None)
        for one in [] if front is None else list(front.requests.values()):
            self._abort(one)

    def receive(self, key: Hashable, message: Request) -> None:
        """From a front end; unknown ones are ignored."""
        front = self._fronts.get(key)
        if front is None:
            return
        self._quiet.restart()
        if isinstance(message, Generate):
            self._generate(front, message)
        elif isinstance(message, Abort):
            if (one := front.requests.get(message.stream)) is not None:
                self._abort(one)
        elif isinstance(message, Ask):
            front.outbox.reply(self._answer(message))

    def turn(self) -> float | None:
        """A step, where there is work. Gives the seconds until the next turn, which begins earlier
        when a message comes; None: only then."""
        self._engine.check()
        while self._commands:
            self._commands.popleft()()
            self._quiet.restart()
        if self._engine.has_work or self._engine.keeps_turning:
            self._collect(self._engine.advance())
            self._quiet.restart()
            self._flush(must=not self._engine.has_work)
            return 0.0
        if not self._flush(must=True):
            return BLOCKED
        left = self._quiet.left if self._prepares else 0.0
        if self._prepares and self._engine.use_idle_moment(not left, self._has_message):
            return 0.0
        return left or None

    def close(self) -> None:
        """Nothing is asked afterwards."""
        if self._grammars is not None:
            self._grammars.close()
        self._engine.close()

    def _has_message(self) -> bool:
        return bool(self._commands) or self._is_wanted()

    def _flush(self, must: bool) -> bool:
        now, done = monotonic(), True
        for front in self._fronts.values():
            done &= front.outbox.is_empty or front.outbox.flush(now, must)
        return done

    def _collect(self, choices: list[Choice]) -> None:
        for choice in choices:
            one = self._open.get(choice.rid)
            if one is None:
                continue
            one.front.outbox.add(one.streams.start + choice.index, choice)
            if choice.req.finish_reason is not None:
                one.num_open -= 1
                if not one.num_open:
                    self._forget(one)

    def _generate(self, front: FrontEnd, message: Generate) -> None:
        n = message.sampling.n
        streams = range(message.stream, message.stream + n)
        one = Open(front, message.rid, streams, n)
        front.requests[message.stream] = self._open[message.rid] = one
        try:
            if message.sampling.grammar is None:
                self._add(one, message, None)
                return
            one.grammar = self._pool().submit(message.sampling.grammar)
        except SpecEngineError as error:
            self._refuse(one, error)
            return
        compiled = partial(self._go_on, one, message, one.grammar)
        one.grammar.future.add_done_callback(lambda _: self.post(compiled))

    def _go_on(self, one: Open, message: Generate, job: GrammarJob) -> None:
        """The grammar is compiled, or not."""
        if self._open.get(one.rid) is not one:
            return
        one.grammar = None
        try:
            self._add(one, message, job.future.result())
        except SpecEngineError as error:
            self._refuse(one, error)

    def _add(self, one: Open, message: Generate, grammar: LlguidanceState | None) -> None:
        if message.embeds:
            self._engine.add_embedding(one.rid, message.prompt_ids)
            return
        sampling, streams = message.sampling, message.streams
        self._engine.add_request(one.rid, message.prompt_ids, sampling, streams, grammar)

    def _refuse(self, one: Open, error: SpecEngineError) -> None:
        self._forget(one)
        one.front.outbox.reply(Refused.of(one.streams.start, error))

    def _abort(self, one: Open) -> None:
        if one.grammar is not None:
            one.grammar.cancel()
        else:
            self._engine.abort(one.rid)
        self._forget(one)
        one.front.outbox.drop(one.streams)

    def _forget(self, one: Open) -> None:
        self._open.pop(one.rid, None)
        one.front.requests.pop(one.streams.start, None)

    def _answer(self, message: Ask) -> Answer:
        operation = self._operations.get(message.what)
        try:
            if operation is None:
                raise RequestError(f"this engine has no {message.what}")
            found = msgspec.msgpack.encode(operation(**message.arguments))
        except SpecEngineError as error:
            return Answer(message.number, msgspec.Raw(b"\xc0"), str(error))
        finally:
            self._collect(self._engine.take_changed())  # it may have ended requests
        return Answer(message.number, msgspec.Raw(found))

    def _pool(self) -> GrammarPool:
        """Made for the first grammar: most engines meet none."""
        if self._grammars is None:
            parts = self._engine.parts
            self._grammars = GrammarPool(parts.grammars, parts.config.limits)
        return self._grammars
