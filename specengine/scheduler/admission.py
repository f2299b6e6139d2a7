"""Which waiting requests may start, and how much of their prompts a forward takes."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import monotonic

from specengine.core.errors import RequestError
from specengine.core.request import FinishReason, Req, ReqState
from specengine.scheduler.exits import Exits
from specengine.scheduler.ledger import KVLedger
from specengine.scheduler.policy import SchedulePolicy
from specengine.scheduler.queues import RequestQueues

# Tokens in common past the cache that make it worth waiting a forward for a cache hit.
SHARED_PREFIX = 64
# Longest output, in tokens, that admission keeps memory for.
LOOKAHEAD = 4096

Head = tuple[int, tuple[int, ...]]  # tokens that came from the cache, the SHARED_PREFIX behind them


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
    """In the order of the queue, as far as request rows and KV memory reach."""

    def __init__(
        self, policy: SchedulePolicy, queues: RequestQueues, ledger: KVLedger, exits: Exits
    ) -> None:
        self.policy = policy
        self.queues = queues
        self.ledger = ledger
        self.exits = exits
        self.demand = Demand()
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

    def plan(self) -> list[Chunk]:
        """Prompt tokens for one forward: those of started prompts first, then of new requests.
        Only the last chunk can leave its prompt unfinished."""
        limit = self.policy.chunked_prefill_size
        budget = limit if limit > 0 else sys.maxsize
        chunks: list[Chunk] = []
        heads: set[Head] = set()
        for req in self._candidates(heads):
            length = min(budget, req.prefill_len - req.kv_len)
            chunks.append(Chunk(req, length, self.ledger.take_saves(req, req.kv_len + length)))
            if (head := _head_of(req)) is not None:
                heads.add(head)
            budget -= length
            if not budget:
                break
        return chunks

    def _candidates(self, heads: set[Head]) -> Iterator[Req]:
        """Requests with prompt tokens to take in. New ones are admitted as they are asked for.
        heads: of those that were taken."""
        yield from list(self.queues.prefilling)
        expected = sum(self._expected_need(req) for req in self.queues.live)
        while (req := self._admit_next(expected, heads)) is not None:
            expected += self._expected_need(req)
            yield req

    def _admit_next(self, expected: int, heads: set[Head]) -> Req | None:
        """Start the first waiting request, unless it has to wait. `expected`: slots to keep free
        for the live ones."""
        self._finish_outgrown()
        if not self.queues.waiting or self.queues.num_live >= self.policy.max_running_requests:
            return None
        req = self.queues.waiting[0]
        if not self.ledger.open(req, self._match_limit(req)):
            return None
        if not self._fits(req, expected) or self._waits_for_prefix(req, heads):
            self.ledger.release(req)
            return None
        self._reserve(req)
        self.queues.waiting.popleft()
        self.queues.prefilling.append(req)
        req.state = ReqState.PREFILLING
        self._count_hits(req)
        return req

    def _reserve(self, req: Req) -> None:
        """Slots of its prompt, and of its first round where it can be: between the two the device
        waits for the host. More than that can be found while the round is in flight."""
        reserve, policy, size = self.ledger.reserve, self.policy, req.prefill_len
        first = max(1, min(policy.round_slots, policy.remaining_tokens(req)))
        reserved = reserve(req, size + first) or reserve(req, size + 1)
        assert reserved, "a request that fits has its prompt reserved"

    def _finish_outgrown(self) -> None:
        """A retracted request may have grown past what the whole memory holds."""
        waiting = self.queues.waiting
        while waiting and not self.ledger.fits_alone(waiting[0].prefill_len + 1):
            self.exits.finish(waiting[0], out_of_memory(waiting[0], self.ledger.capacity))

    def _match_limit(self, req: Req) -> int:
        """Leading tokens that the cache may supply. The last one is always run again: its logits,
        or its hidden state, start what follows."""
        wants_rows = req.needs_all_rows and not req.output_ids
        return 0 if wants_rows else req.prefill_len - 1

    def _fits(self, req: Req, expected: int) -> bool:
        alone = self.queues.num_live == 0
        return alone or self._expected_need(req) + expected <= self.ledger.obtainable

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
        return _head_of(req) in heads

    def _count_hits(self, req: Req) -> None:
        if req.num_retractions:
            return
        req.admitted_time = monotonic()
        req.prefix_hit_len = req.kv_len
        self.num_prompt_tokens += len(req.prompt_ids)
        self.num_cached_tokens += req.kv_len


def _head_of(req: Req) -> Head | None:
    """None where too little of the prompt is left to be worth sharing."""
    start, end = req.cached_len, req.cached_len + SHARED_PREFIX
    return (start, tuple(req.prompt_ids[start:end])) if end <= len(req.prompt_ids) else None


def out_of_memory(req: Req, capacity: int) -> FinishReason:
    return FinishReason(
        "length",
        message=f"the request has {req.seq_len} tokens and the KV memory holds {capacity}; raise "
        "--max-total-tokens or --mem-fraction-static for longer ones",
    )
