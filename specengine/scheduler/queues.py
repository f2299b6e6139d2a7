"""The queues, and which of them each request is in."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count, islice

from specengine.core.request import Req, ReqState

# Requests that may go before a choice, for each unfinished one of the same owner: a single call for
# a hundred choices does not keep later calls waiting until the last of them is served. A number of
# requests, not of seconds: all ranks of a tensor-parallel engine must find the same order.
TURN = 16


@dataclass
class RequestQueues:
    """Every unfinished request is in `by_rid` and in exactly one of the others.

    An owner has the choices of one call. No owner has a second choice live while the first of
    another one waits, as far as choices can give way: a call of a hundred choices costs the others
    what a call of one does.
    """

    by_rid: dict[str, Req] = field(default_factory=dict)
    waiting: deque[Req] = field(default_factory=deque)  # by rank
    prefilling: list[Req] = field(default_factory=list)  # hold KV, cannot decode yet
    running: list[Req] = field(default_factory=list)
    # Of those prefilling, the ones whose tokens a split prefill has begun to run, and its batch: no
    # other forward takes them.
    split: dict[Req, object] = field(default_factory=dict)
    owners: Counter[str] = field(default_factory=Counter)  # unfinished requests of each
    served: Counter[str] = field(default_factory=Counter)  # live ones of each
    _numbers: count[int] = field(default_factory=count)

    @property
    def live(self) -> list[Req]:
        """Those that hold KV memory."""
        return [*self.prefilling, *self.running]

    @property
    def num_live(self) -> int:
        return len(self.prefilling) + len(self.running)

    @property
    def are_single(self) -> bool:
        """Whether no owner has two live requests."""
        return len(self.served) == self.num_live

    def is_unserved(self, req: Req) -> bool:
        """Whether it waits, and no choice of its owner is live."""
        return req.owner not in self.served

    def in_turn(self, most: int) -> list[Req]:
        """Those that wait, as they are to be served, up to `most`: the first choice of each owner
        that is not served before others of the same priority."""
        firsts = list(islice(self._firsts(), most))
        others = self.waiting if not firsts else _without(self.waiting, firsts)
        return firsts + list(islice(others, most - len(firsts)))

    def _firsts(self) -> Iterator[Req]:
        """Of owners that are not served, as far as they have the priority of the queue's head."""
        left = len(self.owners) - len(self.served)
        found: set[str] = set()
        for req in self.waiting:
            if not left or req.sampling.priority != self.waiting[0].sampling.priority:
                return
            if req.owner not in self.served and req.owner not in found:
                left -= 1
                found.add(req.owner)
                yield req

    def first_to_leave(self) -> Req:
        """The live request to be retracted where memory is short, of those whose priority is the
        highest number: the last choice of the owner that has most memory with two or more, or else
        the one with the last place."""
        live = self.live
        lowest = max(req.sampling.priority for req in live)
        live = [req for req in live if req.sampling.priority == lowest]
        several = [req for req in live if self.served[req.owner] > 1]
        return _last_of_largest(several, _memory) or max(live, key=lambda req: req.place)

    def overtaken(
        self, req: Req, spared: Container[Req] = (), for_memory: bool = False
    ) -> Req | None:
        """The live choice that gives way to one that waits, and finds its KV in the cache later:
        the last one of the owner that has most rows, or most memory. None where there is none.

        Its owner keeps more rows than the other one gets. It comes later itself, or the other's
        owner is not served at all. Those of another priority are not interrupted.
        """
        least = self.served[req.owner] + 2
        if self.are_single or max(self.served.values()) < least:
            return None
        place, priority, is_unserved = req.place, req.sampling.priority, self.is_unserved(req)
        candidates = [
            one
            for one in self.live
            if self.served[one.owner] >= least
            and (is_unserved or one.place > place)
            and one.sampling.priority == priority
            and one not in spared
            and one not in self.split
        ]
        return _last_of_largest(candidates, _memory if for_memory else _rows)

    def add(self, req: Req) -> None:
        """Behind those that wait with the same rank."""
        self.by_rid[req.rid] = req
        req.owner = req.owner or req.rid
        unfinished = self.owners.get(req.owner, 0)
        self.owners[req.owner] = unfinished + 1
        req.place = next(self._numbers) + TURN * unfinished
        place, waiting, rank = len(self.waiting), self.waiting, req.rank
        while place and waiting[place - 1].rank > rank:
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
        _take_one(self.owners, req.owner)

    @property
    def num_splits(self) -> int:
        """Split prefills under way."""
        return len(set(map(id, self.split.values())))

    def start_prefilling(self, req: Req) -> None:
        self.waiting.remove(req)
        self.prefilling.append(req)
        self.served[req.owner] = self.served.get(req.owner, 0) + 1
        req.state = ReqState.PREFILLING

    def start_running(self, req: Req) -> None:
        self.prefilling.remove(req)
        self.running.append(req)
        req.state = ReqState.RUNNING

    def remove(self, req: Req) -> None:
        if req.state is ReqState.WAITING:
            self.waiting.remove(req)
            return
        _take_one(self.served, req.owner)
        if req.state is ReqState.RUNNING:
            self.running.remove(req)
        else:
            self.prefilling.remove(req)
            self.split.pop(req, None)


def _without(reqs: Iterable[Req], gone: Iterable[Req]) -> Iterator[Req]:
    seen = set(gone)
    return (req for req in reqs if req not in seen)


def _take_one(counts: Counter[str], owner: str) -> None:
    """Counts of nothing are not kept."""
    left = counts[owner] - 1
    if left:
        counts[owner] = left
    else:
        counts.pop(owner)


def _rows(reqs: Iterable[Req]) -> Counter[str]:
    """Of each owner."""
    return Counter(req.owner for req in reqs)


def _memory(reqs: Iterable[Req]) -> Counter[str]:
    """KV slots of each owner; a prompt that its choices share counts once."""
    slots: Counter[str] = Counter()
    shared: set[tuple[str, int]] = set()
    for req in reqs:
        slots[req.owner] += req.reserved_len - req.cached_len
        prefix = req.owner, id(req.last_node)
        if prefix not in shared:
            shared.add(prefix)
            slots[req.owner] += req.cached_len
    return slots


def _last_of_largest(reqs: list[Req], count: Callable[[list[Req]], Counter[str]]) -> Req | None:
    """Of the owner that has most, the request with the last place."""
    if not reqs:
        return None
    owner, _ = count(reqs).most_common(1)[0]
    return max((req for req in reqs if req.owner == owner), key=lambda req: req.place)
