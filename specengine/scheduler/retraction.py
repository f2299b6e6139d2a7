"""KV memory for the next round of the running requests, at the cost of others if need be."""

from __future__ import annotations

from specengine.core.request import Req, ReqState
from specengine.scheduler.admission import Demand, out_of_memory
from specengine.scheduler.ledger import KVLedger
from specengine.scheduler.lifecycle import RequestLifecycle
from specengine.scheduler.policy import SchedulePolicy
from specengine.scheduler.queues import RequestQueues

# Tokens reserved past a round while memory is plentiful, so that most rounds reserve nothing.
AHEAD = 64


class RoundMemory:
    """Reserves the bound of a round for every running request.

    Under pressure, in this order: the cache is evicted, slots that were reserved ahead are taken
    back, and requests are retracted: of the highest number of priority, the last choices of the
    call that has most memory; where each call has one, those that arrived last. The first of all
    always goes on; one that has the whole memory and still needs more is finished.
    """

    def __init__(
        self,
        policy: SchedulePolicy,
        queues: RequestQueues,
        ledger: KVLedger,
        lifecycle: RequestLifecycle,
        demand: Demand,
    ) -> None:
        self.policy = policy
        self.queues = queues
        self.ledger = ledger
        self.lifecycle = lifecycle
        self.demand = demand

    def reserve(self, slots: int) -> None:
        """Have slots for `slots` more tokens of each running request; some may leave."""
        self.demand.decay()
        short, ahead = self._short(self.queues.running, slots)
        if not short:
            return
        short.sort(key=lambda r: r.rank)
        if self.ledger.reserve_all(short, [self._wanted(req, slots, ahead) for req in short]):
            return
        for req in short:
            self._secure(req, slots, ahead)

    def reserve_unseen(self, reqs: list[Req], slots: int) -> bool:
        """Have slots for `slots` more tokens of these requests, whose last round is still on its
        way. False where that would be at the cost of others."""
        short, ahead = self._short(reqs, slots)
        if not short:
            return True
        return self.ledger.reserve_all(short, [self._wanted(req, slots, ahead) for req in short])

    def _short(self, reqs: list[Req], slots: int) -> tuple[list[Req], int]:
        """Which requests lack slots for the next round, and how many to reserve past it. While
        memory is plentiful, those that would lack some soon are among them: each reservation takes
        a copy to the device, and otherwise some request would ask for one in every round."""
        short = self._below(reqs, slots)
        if not short or not self._is_plenty(len(reqs), slots):
            return short, 0
        return self._below(reqs, slots + AHEAD // 2), AHEAD

    def _below(self, reqs: list[Req], slots: int) -> list[Req]:
        """Asked in every round, of every request."""
        context = self.policy.context_len
        return [req for req in reqs if req.reserved_len < min(req.kv_len + slots, context)]

    def _is_plenty(self, requests: int, slots: int) -> bool:
        """What the cache would give up counts: it fills all memory in time."""
        return self.ledger.obtainable > 2 * requests * (AHEAD + slots)

    def _bound(self, req: Req, slots: int) -> int:
        return min(req.kv_len + slots, self.policy.context_len)

    def _wanted(self, req: Req, slots: int, ahead: int) -> int:
        return self._bound(req, slots + min(ahead, self.policy.remaining_tokens(req)))

    def _secure(self, req: Req, slots: int, ahead: int) -> None:
        if req.state is ReqState.RUNNING and ahead:
            self.ledger.reserve(req, self._wanted(req, slots, ahead))
        wanted = self._bound(req, slots)
        while req.state is ReqState.RUNNING and not self.ledger.reserve(req, wanted):
            if self.queues.num_live == 1:
                self._take_the_rest(req, wanted)
                return
            if not self._take_back(slots):
                self.lifecycle.retract(self.queues.first_to_leave())
                self.demand.grow()

    def _take_the_rest(self, req: Req, wanted: int) -> None:
        """The last request drafts less when memory runs out, and ends when it cannot go on."""
        self.ledger.reserve(req, min(wanted, req.reserved_len + self.ledger.obtainable))
        if req.reserved_len <= req.kv_len:
            self.lifecycle.finish(req, out_of_memory(req, self.ledger.capacity))

    def _take_back(self, slots: int) -> bool:
        """Whether slots reserved ahead of need were found."""
        before = self.ledger.obtainable
        for req in self.queues.running:
            self.ledger.trim(req, self._bound(req, slots))
        return self.ledger.obtainable > before
