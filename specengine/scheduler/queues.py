"""Where each request stands."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from specengine.core.request import Req, ReqState


@dataclass
class RequestQueues:
    """Every unfinished request is in `by_rid` and in exactly one of the others."""

    by_rid: dict[str, Req] = field(default_factory=dict)
    waiting: deque[Req] = field(default_factory=deque)  # by priority; then first come, first served
    prefilling: list[Req] = field(default_factory=list)  # hold KV, cannot decode yet
    running: list[Req] = field(default_factory=list)

    @property
    def live(self) -> list[Req]:
        """Those that hold KV memory."""
        return [*self.prefilling, *self.running]

    @property
    def num_live(self) -> int:
        return len(self.prefilling) + len(self.running)

    def newest(self) -> Req:
        """The live request that arrived last, of those whose priority is the highest number."""
        return max(self.live, key=lambda req: req.rank)

    def add(self, req: Req) -> None:
        """Behind those that wait with the same priority."""
        self.by_rid[req.rid] = req
        place, waiting = len(self.waiting), self.waiting
        while place and waiting[place - 1].sampling.priority > req.sampling.priority:
            place -= 1
        waiting.insert(place, req)

    def put_back(self, req: Req) -> None:
        """Before those that wait with the same priority."""
        place, waiting = 0, self.waiting
        while place < len(waiting) and waiting[place].sampling.priority < req.sampling.priority:
            place += 1
        waiting.insert(place, req)

    def start_running(self, req: Req) -> None:
        self.prefilling.remove(req)
        self.running.append(req)
        req.state = ReqState.RUNNING

    def remove(self, req: Req) -> None:
        if req.state is ReqState.RUNNING:
            self.running.remove(req)
        elif req.state is ReqState.PREFILLING:
            self.prefilling.remove(req)
        else:
            self.waiting.remove(req)
