"""Which waiting requests may start, and how much of their prompts a forward takes."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import monotonic

from specengine.core.errors import RequestError
from specengine.core.request import FinishReason, Req, ReqState
from specengine.scheduler.ledger import KVLedger
from specengine.scheduler.lifecycle import RequestLifecycle
from specengine.scheduler.pace import PromptPace
from specengine.scheduler.policy import SchedulePolicy
from specengine.scheduler.prefill_plan import Head, PrefillPlan, head_of
from specengine.scheduler.queues import RequestQueues

# Longest output, in tokens, that admission keeps memory for.
LOOKAHEAD = 4096

# A request is small that is expected to take this part of the free memory: it need not wait until
# there is memory for all that others are expected to take.
SMALL = 64
LOOK_BEHIND = 16  # waiting requests among which those are looked for that pass the first
MOST_PASSED = 1000  # requests that may pass the same one


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next prompt tokens of one request."""

    req: Req
    length: int
    saves: Sequence[tuple[int, int]] = ()  # as KVLedger.take_saves gives them


@dataclass
class Demand:
    """How much of its remaining output a request is expected to really produce.

    Begins as half. Each retraction says that too little was kept free, each round without one that
    a little less will do.
    """

    share: float = 0.5

    def grow(self) -> None:
        self.share = min(1.0, self.share + 0.25)

    def decay(self) -> None:
        self.share = max(0.1, self.share * 0.995)


class Admission:
    """Which prompts a forward takes in, as far as request rows and KV memory reach.

    The first of the queue (RequestQueues.in_turn) is served first: where it lacks a row or memory,
    choices of other calls give way to it (RequestQueues.overtaken), and small requests alone are
    admitted before it. Where the prompts are more than a forward takes, half of it goes to those
    that are shorter than the first, and of no lower priority, the shortest first, so that a short
    one does not wait for many long ones. The first has the other half at least, so that it never
    starves.
    """

    def __init__(
        self,
        policy: SchedulePolicy,
        queues: RequestQueues,
        ledger: KVLedger,
        lifecycle: RequestLifecycle,
    ) -> None:
        self.policy = policy
        self.queues = queues
        self.ledger = ledger
        self.lifecycle = lifecycle
        self.demand = Demand()
        self.pace = PromptPace()
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0

    def check(self, req: Req) -> None:
        """Raise RequestError for a prompt that can never be served."""
        size, context = len(req.prompt_ids), self.policy.context_len
        if not size:
            raise RequestError("the prompt is empty; give at least one token", "prompt")
        if size >= context:
            raise RequestError(
                f"the prompt has {size} tokens and the context length is {context}, so no token "
                "can follow; shorten it, or raise --context-length if the model allows",
                "prompt",
            )
        if not self.ledger.fits_alone(size + 1):
            raise RequestError(
                f"the prompt has {size} tokens and the KV memory holds {self.ledger.capacity}; "
                "shorten it, or raise --max-total-tokens or --mem-fraction-static",
                "prompt",
            )

    def plan(self, most_together: int | None = None, below: int | None = None) -> list[Chunk]:
        """Prompt tokens for one forward, those of started prompts before those of new ones. Several
        prompts may stay unfinished. most_together: tokens that several prompts may have in one
        forward; where they have more, the first prompt is alone in it. below: only prompts that
        have fewer tokens left, and fewer in all."""
        limit = self.policy.chunked_prefill_size
        budget = self.pace.begin(limit) if limit > 0 else sys.maxsize
        split = self.queues.split
        started = [req for req in self.queues.prefilling if req not in split]
        waiting = self._next_waiting()
        pool = started + waiting
        if below is not None:
            budget, pool = min(budget, below - 1), shorter_than(pool, below)
        plan = PrefillPlan(budget, waiting)
        for req in self.queues.live:
            plan.kept.add(req, self._expected_need(req))
        for req in split:
            plan.note_head(req)
        if not pool:
            return []
        has_first = self._start(pool[0], plan)
        if has_first:
            plan.note_head(pool[0])
        kept = budget - budget // 2 if has_first else 0
        for req in _shorter(pool, budget):
            if plan.left <= kept:
                break
            if self._start(req, plan):
                plan.take(req, plan.left - kept)
        for req in pool:
            if not plan.left:
                break
            if self._start(req, plan):
                plan.take(req, plan.left)
        order = {req: place for place, req in enumerate(pool)}
        self.queues.prefilling.sort(key=lambda req: order.get(req, -1))
        taken = [req for req in pool if req in plan.lengths]
        if most_together is not None and sum(plan.lengths.values()) > most_together:
            taken = taken[:1]
        lengths, saves = plan.lengths, self.ledger.take_saves
        return [Chunk(req, lengths[req], saves(req, req.kv_len + lengths[req])) for req in taken]

    def _next_waiting(self) -> list[Req]:
        """Those that may be admitted: no more than there are rows for, or look behind the first
        for small ones. Where there is no row, those to which others may give way."""
        queues = self.queues
        room = self.policy.max_running_requests - queues.num_live
        if room > 0 or not queues.waiting:
            return queues.in_turn(max(room, LOOK_BEHIND))
        first, *others = queues.in_turn(LOOK_BEHIND)
        if queues.overtaken(first) is None:
            return []
        return [first, *filter(queues.is_unserved, others)]

    def _start(self, req: Req, plan: PrefillPlan) -> bool:
        """Whether the request has its memory: a waiting one is admitted where it can be."""
        if req.state is ReqState.PREFILLING:
            return True
        first = plan.first
        if req.is_finished or not self._may_try(req, plan, first):
            return False
        if not self.ledger.fits_alone(req.prefill_len + 1):  # it was retracted, and has grown
            self.lifecycle.finish(req, out_of_memory(req, self.ledger.capacity))
            return False
        while not self._opens(req, plan):
            if not self._is_ahead(req, plan.blocked):
                return False
            later = self._overtaken(req, plan)
            if later is None:
                plan.blocked = req
                return False
            self.lifecycle.retract(later)
            plan.give_back(later)
            first = plan.first
        if self._waits_for_prefix(req, plan.heads):
            self.ledger.release(req)
            return False
        self._reserve(req)
        self.queues.start_prefilling(req)
        self._count_hits(req)
        plan.kept.add(req, self._expected_need(req))
        if first is not None and first is not req:
            first.num_passed += 1
        return True

    def _overtaken(self, req: Req, plan: PrefillPlan) -> Req | None:
        """The choice that gives way to it; none whose tokens the forward has taken in."""
        has_row = self.queues.num_live < self.policy.max_running_requests
        return self.queues.overtaken(req, plan.lengths, for_memory=has_row)

    def _is_ahead(self, req: Req, blocked: Req | None) -> bool:
        """Whether it need not wait for `blocked`: that one is a further choice of an owner that is
        served, and it is the first choice of one that is not."""
        if blocked is None:
            return True
        return self.queues.is_unserved(req) and not self.queues.is_unserved(blocked)

    def _may_try(self, req: Req, plan: PrefillPlan, first: Req | None) -> bool:
        """Not all may pass the first for ever. One that asks for little need not wait for the
        memory that one before it waits for."""
        if first is not None and req is not first and first.num_passed >= MOST_PASSED:
            return False
        blocked = plan.blocked
        if blocked is None or self._is_ahead(req, blocked):
            return True
        plan.num_tried += 1
        if plan.num_tried > LOOK_BEHIND or req is blocked:
            return False
        is_equal = req.sampling.priority == blocked.sampling.priority
        return is_equal and self._is_small(self._expected_need(req))

    def _opens(self, req: Req, plan: PrefillPlan) -> bool:
        """Give it a row and what the cache has of it, if row and memory are there."""
        if self.queues.num_live >= self.policy.max_running_requests:
            return False
        if not self.ledger.open(req, self._match_limit(req)):
            return False
        goes_first = self.queues.is_unserved(req) and not self.queues.are_single
        if self._fits(req, plan.kept.of_firsts() if goes_first else plan.kept.before(req)):
            return True
        self.ledger.release(req)
        return False

    def _reserve(self, req: Req) -> None:
        """Slots of its prompt, and of its first round where it can be: between the two the device
        waits for the host. More than that can be found while the round is in flight."""
        reserve, policy, size = self.ledger.reserve, self.policy, req.prefill_len
        first = max(1, min(policy.round_slots, policy.remaining_tokens(req)))
        reserved = reserve(req, size + first) or reserve(req, size + 1)
        assert reserved, "a request that fits has its prompt reserved"

    def _match_limit(self, req: Req) -> int:
        """Leading tokens that the cache may supply. The last one is always run again: its logits,
        or its hidden state, start what follows."""
        wants_rows = req.needs_all_rows and not req.output_ids
        return 0 if wants_rows else req.prefill_len - 1

    def _fits(self, req: Req, expected: int) -> bool:
        if self.queues.num_live == 0:
            return True
        need = self._expected_need(req)
        return need + expected <= self.ledger.obtainable or self._is_small(need)

    def _is_small(self, slots: int) -> bool:
        return slots * SMALL <= self.ledger.obtainable

    def _expected_need(self, req: Req) -> int:
        """Slots that the request is expected to ask for from now on."""
        policy = self.policy
        output = min(policy.remaining_tokens(req), LOOKAHEAD)
        growth = math.ceil(self.demand.share * output) + policy.round_slots
        length = max(req.kv_len, req.prefill_len) + growth
        return self.ledger.shortage(req, min(length, policy.context_len))

    def _waits_for_prefix(self, req: Req, heads: set[Head]) -> bool:
        """Whether this forward writes a long prefix that the request could find in the cache by
        the next one."""
        if self.ledger.cache.disable or self._match_limit(req) == 0:
            return False
        return head_of(req) in heads

    def _count_hits(self, req: Req) -> None:
        if req.num_retractions:
            return
        req.admitted_time = monotonic()
        req.prefix_hit_len = req.kv_len
        self.num_prompt_tokens += len(req.prompt_ids)
        self.num_cached_tokens += req.kv_len


def shorter_than(pool: Iterable[Req], tokens: int) -> list[Req]:
    """Those with fewer tokens left. Of waiting ones it is not known what the cache has of them."""
    return [req for req in pool if req.prefill_len - req.kv_len < tokens]


def _shorter(pool: list[Req], budget: int) -> list[Req]:
    """Prompts that go before the first, for a part of the forward; none where all fit. Of waiting
    ones it is not known yet what the cache has of them."""
    left = {req: req.prefill_len - req.kv_len for req in pool}
    if sum(left.values()) <= budget:
        return []
    most, lowest = left[pool[0]], pool[0].sampling.priority
    shorter = [req for req in pool if left[req] < most and req.sampling.priority <= lowest]
    return sorted(shorter, key=lambda req: (req.sampling.priority, left[req]))


def out_of_memory(req: Req, capacity: int) -> FinishReason:
    return FinishReason(
        "length",
        message=f"the request has {req.seq_len} tokens and the KV memory holds {capacity}; raise "
        "--max-total-tokens or --mem-fraction-static for longer ones",
    )
