"""The engine's side: requests come in, the engine steps, and what was gained goes out."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any

import msgspec

from specengine.core.errors import (
    ConfigError,
    EngineAsleepError,
    ModelLoadError,
    OutOfMemoryError,
    RequestError,
    SpecEngineError,
)
from specengine.core.grammar import GrammarSpec
from specengine.engine.background_capture import QuietTime
from specengine.engine.grammar.pool import GrammarJob, GrammarPool
from specengine.engine.grammar.state import LlguidanceState
from specengine.engine.loop import Engine
from specengine.engine.outgoing import Choice, given_up, is_named
from specengine.engine.serving.messages import (
    Abort,
    Answer,
    Ask,
    Failure,
    Generate,
    Refused,
    Request,
)
from specengine.engine.serving.outbox import Outbox, Send

logger = logging.getLogger(__name__)

BLOCKED = 0.005  # seconds until a front end that takes nothing is tried again
NIL = msgspec.Raw(b"\xc0")
INTERNAL = "internal error; the server's log has the details"
# What operations raise before they change anything.
REFUSALS = (RequestError, EngineAsleepError, ConfigError, ModelLoadError, OutOfMemoryError)
READING = frozenset({"stats", "is_sleeping"})  # operations that never change anything


@dataclass(eq=False)
class FrontEnd:
    """A caller, and what it waits for, by the stream of the first choice."""

    outbox: Outbox
    requests: dict[int, Open] = field(default_factory=dict)


@dataclass(eq=False)
class Open:
    """A request that has not ended."""

    front: FrontEnd
    message: Generate
    num_open: int  # choices
    grammar: GrammarJob | None = None  # while it is compiled

    @property
    def rid(self) -> str:
        return self.message.rid

    @property
    def streams(self) -> range:
        return range(self.message.stream, self.message.stream + self.message.sampling.n)


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
            "give_up": self._give_up,
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
        """Add a front end, which may send requests from now on."""
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
        """No call may follow."""
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
            one.front.outbox.add(one.message.stream + choice.index, choice)
            if choice.req.finish_reason is not None:
                one.num_open -= 1
                if not one.num_open:
                    self._forget(one)

    def _generate(self, front: FrontEnd, message: Generate) -> None:
        one = Open(front, message, message.sampling.n)
        front.requests[message.stream] = self._open[message.rid] = one
        if message.sampling.grammar is None:
            self._admit(one, lambda: self._add(one, None))
        else:
            self._admit(one, partial(self._compile, one, message.sampling.grammar))

    def _compile(self, one: Open, grammar: GrammarSpec) -> None:
        one.grammar = job = self._pool().submit(grammar)
        compiled = partial(self._go_on, one, job)
        job.future.add_done_callback(lambda _: self.post(compiled))

    def _go_on(self, one: Open, job: GrammarJob) -> None:
        """The grammar is compiled, or not."""
        if self._open.get(one.rid) is not one:
            return
        one.grammar = None
        self._admit(one, lambda: self._add(one, job.future.result()))

    def _admit(self, one: Open, step: Callable[[], object]) -> None:
        """A step on a request's way into the queue. Whatever it raises refuses that request alone:
        no device has seen it, and nothing of it stays in the engine."""
        try:
            step()
        except SpecEngineError as error:
            self._refuse(one, error)
        except Exception:
            logger.exception("a request cannot be queued")
            self._engine.abort(one.rid)  # the choices that were queued before the error
            self._refuse(one, SpecEngineError(INTERNAL))

    def _add(self, one: Open, grammar: LlguidanceState | None) -> None:
        message = one.message
        if message.embeds:
            self._engine.add_embedding(one.rid, message.prompt_ids)
            return
        sampling, streams = message.sampling, message.streams
        self._engine.add_request(one.rid, message.prompt_ids, sampling, streams, grammar)

    def _refuse(self, one: Open, error: SpecEngineError) -> None:
        self._forget(one)
        one.front.outbox.reply(Refused.of(one.message.stream, error))

    def _give_up(self, names: Sequence[str] | None) -> int:
        """Engine.give_up, and of requests whose grammars are still compiled."""
        count, tokenizer = 0, self._engine.parts.tokenizer
        for one in list(self._open.values()):
            if one.grammar is not None and (names is None or is_named(one.rid, names)):
                one.grammar.cancel()
                asked = one.message
                self._collect(given_up(asked.rid, asked.prompt_ids, asked.sampling, tokenizer))
                count += 1
        return count + self._engine.give_up(names)

    def _abort(self, one: Open) -> None:
        if one.grammar is not None:
            one.grammar.cancel()
        else:
            self._engine.abort(one.rid)
        self._forget(one)
        one.front.outbox.drop(one.streams)

    def _forget(self, one: Open) -> None:
        self._open.pop(one.rid, None)
        one.front.requests.pop(one.message.stream, None)

    def _answer(self, message: Ask) -> Answer:
        """Raises what an operation that changes the engine raises, unless that says that nothing
        has changed: a round may have failed in it, or weights be half in place."""
        try:
            found = self._operate(message)
        except REFUSALS as error:
            return Answer(message.number, NIL, Failure.of(error))
        except Exception:
            if message.what not in READING:
                raise
            logger.exception("the engine cannot answer %s", message.what)
            return Answer(message.number, NIL, Failure.of(SpecEngineError(INTERNAL)))
        finally:
            self._collect(self._engine.take_changed())  # it may have ended requests
        return Answer(message.number, found)

    def _operate(self, message: Ask) -> msgspec.Raw:
        operation = self._operations.get(message.what)
        if operation is None:
            raise RequestError(f"this engine has no {message.what}")
        return msgspec.Raw(msgspec.msgpack.encode(operation(**message.arguments)))

    def _pool(self) -> GrammarPool:
        """Made for the first grammar: most engines meet none."""
        if self._grammars is None:
            parts = self._engine.parts
            self._grammars = GrammarPool(parts.grammars, parts.config.limits)
        return self._grammars
