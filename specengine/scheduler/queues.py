"""Where each request stands."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import count

from specengine.core.request import Req, ReqState

# Requests that may go before a choice, for each unfinished one of the same owner: a single call for
# a hundred choices does not keep later calls waiting until the last of them is served. A number of
# requests, not of seconds: all ranks of a tensor-parallel engine must find the same order.
TURN = 16


@dataclass
class RequestQueues:
    """Every unfinished request is in `by_rid` and in exactly one of the others."""

    by_rid: dict[str, Req] = field(default_factory=dict)
    waiting: deque[Req] = field(default_factory=deque)  # by rank
    prefilling: list[Req] = field(default_factory=list)  # hold KV, cannot decode yet
    running: list[Req] = field(default_factory=list)
    # Of those prefilling, the ones whose tokens a split prefill has begun to run, and its batch: no
    # other forward takes them.
    split: dict[Req, object] = field(default_factory=dict)
    owners: Counter[str] = field(default_factory=Counter)  # unfinished requests of each
    _numbers: count[int] = field(default_factory=count)

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

    def overtaken(self, req: Req) -> Req | None:
        """The last running choice of another owner whose turn comes after this one's: it gives way,
        and finds its KV in the cache later. None where there is none. Those of another priority
        are not interrupted."""
        place, priority = req.place, req.sampling.priority
        later = [
            one
            for one in self.running
            if one.place > place and one.owner and one.sampling.priority == priority
        ]
        return max(later, key=lambda one: one.place, default=None)

    def add(self, req: Req) -> None:
        """Behind those that wait with the same rank."""
        self.by_rid[req.rid] = req
        req.place = next(self._numbers)
        if req.owner:
            req.place += TURN * self.owners[req.owner]
            self.owners[req.owner] += 1
        place, waiting = len(self.waiting), self.waiting
        while place and waiting[place - 1].rank > req.rank:
            place -= 1
        waiting.insert(place, req)

    def put_back(self, req: Req) -> None:
        """Before those that wait with the same rank."""
        place, waiting = 0, self.waiting
        while place < len(waiting) and waiting[place].rank < req.rank:
            place += 1
        waiting.insert(place, req)

    def forget(self, req: Req) -> None:
        """It has ended."""
        del self.by_rid[req.rid]
        if req.owner:
            self.owners[req.owner] -= 1
            if not self.owners[req.owner]:
                del self.owners[req.owner]

    @property
    def num_splits(self) -> int:
        """Split prefills under way."""
        return len(set(map(id, self.split.values())))

    def start_running(self, req: Req) -> None:
        self.prefilling.remove(req)
        self.running.append(req)
        req.state = ReqState.RUNNING

    def remove(self, req: Req) -> None:
        if req.state is ReqState.RUNNING:
            self.running.remove(req)
        elif req.state is ReqState.PREFILLING:
            self.prefilling.remove(req)
            self.split.pop(req, None)
        else:
            self.waiting.remove(req)
