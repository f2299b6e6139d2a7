"""Engines in lock-step: rank 0's sends each call to the others before it runs it."""

from __future__ import annotations

import gc
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any
from zlib import crc32

from specengine.core.batch import ScheduleBatch
from specengine.core.errors import EngineStoppedError
from specengine.core.interfaces import LogitsOutput
from specengine.core.parallel import of_each
from specengine.core.registry import load_place
from specengine.core.request import Req
from specengine.core.sampling import SamplingParams
from specengine.core.spec import VerifyResult
from specengine.engine.grammar.state import LlguidanceState
from specengine.engine.loop import Engine
from specengine.engine.outgoing import Choice
from specengine.engine.parallel.links import LeadLink
from specengine.engine.parallel.messages import Add, Call, Do, Idle, Message, Step
from specengine.engine.parts import EngineParts


def make_engine(parts: EngineParts) -> RankEngine:
    if isinstance(parts.link, LeadLink):
        return LeadEngine(parts, parts.link)
    return RankEngine(parts)


class RankEngine(Engine):
    """The engine of one of several ranks. digest: of all tokens that it has committed."""

    def __init__(self, parts: EngineParts) -> None:
        super().__init__(parts)
        self.digest = 0

    def _commit(self, reqs: list[Req], result: VerifyResult) -> None:
        self._digest(chain.from_iterable(result.tokens))
        super()._commit(reqs, result)

    def _prefill(self, batch: ScheduleBatch) -> None:
        super()._prefill(batch)
        self._digest(req.last_token for req in batch.reqs)

    def _take_split(self, batch: ScheduleBatch, output: LogitsOutput) -> None:
        super()._take_split(batch, output)
        self._digest(req.last_token for req in batch.reqs)

    def use_idle_moment(
        self, may_capture: bool = True, is_wanted: Callable[[], bool] = lambda: False
    ) -> bool:
        """is_wanted: of rank 0; all ranks give the same capture up at the same point."""
        decide = self.parts.link.decide
        return super().use_idle_moment(
            may_capture, lambda: decide(lambda: (int(is_wanted()),)) == (1,)
        )

    def sleep(self, level: int = 1) -> int:
        """Gives the bytes of all ranks."""
        return sum(of_each(self.parts.link.communicator, super().sleep(level)))

    def _digest(self, tokens: Iterator[int]) -> None:
        self.digest = crc32(array("q", tokens), self.digest)


class LeadEngine(RankEngine):
    """Rank 0's."""

    def __init__(self, parts: EngineParts, link: LeadLink) -> None:
        super().__init__(parts)
        self.link = link
        self.number = link.num_engines
        self._depth = 0  # calls within calls are not sent again
        self._forget = weakref.finalize(self, link.dropped.append, self.number)

    def add_request(
        self,
        rid: str,
        prompt_ids: list[int],
        sampling: SamplingParams,
        stream: bool = True,
        grammar: LlguidanceState | None = None,
    ) -> None:
        if sampling.seed is None:
            sampling = replace(sampling, seed=self.seeds.getrandbits(62))
        super().add_request(rid, prompt_ids, sampling, stream, grammar)
        self.link.tell(Add(self.number, rid, prompt_ids, sampling))

    def add_embedding(self, rid: str, prompt_ids: list[int]) -> None:
        super().add_embedding(rid, prompt_ids)
        self.link.tell(Do(self.number, "add_embedding", [rid, prompt_ids]))

    def abort(self, rid: str) -> None:
        with self._telling(Do(self.number, "abort", [rid])):
            super().abort(rid)

    def give_up(self, names: Sequence[str] | None = None) -> int:
        given = None if names is None else list(names)
        with self._telling(Do(self.number, "give_up", [given])):
            return super().give_up(given)

    def flush_cache(self) -> int:
        with self._telling(Do(self.number, "flush_cache", [])):
            return super().flush_cache()

    def update_weights(self, model: str | None = None, draft_model: str | None = None) -> int:
        self.sleeper.require_awake()  # before it is sent: a rank that refuses it ends
        with self._telling(Do(self.number, "update_weights", [model, draft_model])):
            return super().update_weights(model, draft_model)

    def finish_rounds(self) -> None:
        with self._telling(Do(self.number, "finish_rounds", [])):
            super().finish_rounds()

    def sleep(self, level: int = 1) -> int:
        gc.collect()  # engines that are gone: the other ranks let go of theirs first
        with self._telling(Do(self.number, "sleep", [level])):
            return super().sleep(level)

    def wake(self) -> None:
        with self._telling(Do(self.number, "wake", [])):
            super().wake()

    def advance(self) -> list[Choice]:
        if self.host_round.recorders and self.parts.config.trace.trace is None:
            raise EngineStoppedError("rounds cannot be recorded on several ranks: --tp-size 1")
        with self._telling(Step(self.number, self.digest)):
            return super().advance()

    def use_idle_moment(
        self, may_capture: bool = True, is_wanted: Callable[[], bool] = lambda: False
    ) -> bool:
        if self.pipeline is None:
            return False
        with self._telling(Idle(self.number, may_capture)):
            return super().use_idle_moment(may_capture, is_wanted)

    def call(self, place: str, **arguments: Any) -> Any:
        """``function(engine, **arguments)`` on every rank, of the function at "module:name"."""
        function: Callable[..., Any] = load_place(place)
        with self._telling(Call(self.number, place, arguments)):
            return function(self, **arguments)

    def check(self) -> None:
        self.link.watch.check()

    def call_if_stopped(self, tell: Callable[[], object]) -> None:
        self.link.watch.when_failed.append(tell)

    def close(self) -> None:
        super().close()
        self._forget()
        if self.parts.owns_ranks:
            self.link.watch.end()

    @contextmanager
    def _telling(self, message: Message) -> Iterator[None]:
        if not self._depth:
            self.link.tell(message)
        self._depth += 1
        try:
            with self.link.watch.named():
                yield
            self.check()  # a collective that was aborted has left anything
        finally:
            self._depth -= 1
