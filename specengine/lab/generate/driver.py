"""Keeps an engine full of requests, for the fewest steps of Python a token."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from specengine.core.request import Req
from specengine.engine.loop import Engine
from specengine.lab.generate.dialogue_writer import Ask, Reply

Key = TypeVar("Key", bound=Hashable)

# New requests join the running ones so many at a time, as a share of all: each time costs a
# forward of its own, in which the others wait.
BURST_SHARE = 16


@dataclass(frozen=True)
class Answered(Generic[Key]):
    key: Key
    reply: Reply


class EngineDriver(Generic[Key]):
    """Runs requests by key. Nothing is detokenized, and no output made, while they run."""

    def __init__(self, engine: Engine, concurrency: int) -> None:
        self.engine = engine
        self.concurrency = concurrency
        self.num_tokens = 0  # of finished requests
        self._burst = max(1, concurrency // BURST_SHARE)
        self._waiting: deque[tuple[Key, Ask]] = deque()
        self._running: dict[Req, Key] = {}
        self._count = 0

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self._running

    @property
    def has_room(self) -> bool:
        """Whether requests that are submitted now can run at once."""
        return len(self._running) + len(self._waiting) < self.concurrency

    def submit(self, key: Key, ask: Ask) -> None:
        self._waiting.append((key, ask))

    def step(self) -> list[Answered[Key]]:
        """Start what waits, in bursts, and run one forward -> what finished."""
        free = self.concurrency - len(self._running)
        if free >= self._burst or not self._running:
            while self._waiting and len(self._running) < self.concurrency:
                self._start(*self._waiting.popleft())
        if not self._running:
            return []
        self.engine.step()
        done = [req for req in self._running if req.finish_reason is not None]
        return [self._finish(req) for req in done]

    def abort(self) -> None:
        """Let everything go."""
        self._waiting.clear()
        for req in self._running:
            self.engine.scheduler.abort(req.rid)
        self._running.clear()
        if self.engine.has_work:
            self.engine.step()

    def _start(self, key: Key, ask: Ask) -> None:
        engine = self.engine
        self._count += 1
        engine.add_request(f"data-{self._count}", ask.prompt_ids, ask.sampling)
        # A request that is no choice of the engine's makes no outputs: its Req says all.
        req, _ = engine.choices.popitem()
        self._running[req] = key

    def _finish(self, req: Req) -> Answered[Key]:
        assert req.finish_reason is not None
        self.num_tokens += len(req.output_ids)
        return Answered(self._running.pop(req), Reply(req.output_ids, req.finish_reason))
