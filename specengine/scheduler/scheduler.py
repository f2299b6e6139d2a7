"""What runs next, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

import torch

from specengine.core.batch import ScheduleBatch
from specengine.core.errors import InvariantError, RequestError
from specengine.core.forward_mode import ForwardMode
from specengine.core.request import FinishReason, Req, ReqState, TokenLogprob
from specengine.core.sampling import SamplingParams
from specengine.core.spec import PrefillResult, VerifyResult
from specengine.core.spec_stats import DepthChoice
from specengine.core.spec_totals import SpecTotals
from specengine.scheduler.admission import Admission
from specengine.scheduler.batching import BatchBuilder
from specengine.scheduler.finish import Cut, StopStrings, TextDecoder, find_cut
from specengine.scheduler.ledger import KVLedger
from specengine.scheduler.lifecycle import RequestLifecycle
from specengine.scheduler.policy import SchedulePolicy
from specengine.scheduler.queues import RequestQueues
from specengine.scheduler.retraction import RoundMemory
from specengine.scheduler.split_prompts import SplitPrompts

_BEFORE_ROUNDS = {ForwardMode.EXTEND, ForwardMode.SPLIT_PREFILL}  # not MIXED: it decodes too


class Scheduler:
    """Continuous batching: `schedule` gives the next batch, `commit_prefill` or `commit_round`
    takes its outcome. Prefill forwards and rounds alternate while there is work for both.

    make_decoder: a fresh text decoder of a request, in which its stop strings are looked for.
    device: where the sampling parameters of a batch are needed.

    Requests may be added or aborted at any time but between `schedule` and the forward.
    """

    def __init__(
        self,
        policy: SchedulePolicy,
        ledger: KVLedger,
        vocab_size: int,
        device: torch.device,
        make_decoder: Callable[[SamplingParams], TextDecoder],
    ) -> None:
        self.policy = policy
        self.ledger = ledger
        self.queues = RequestQueues()
        self.lifecycle = RequestLifecycle(self.queues, ledger)
        self.admission = Admission(policy, self.queues, ledger, self.lifecycle)
        self.rounds = RoundMemory(
            policy, self.queues, ledger, self.lifecycle, self.admission.demand
        )
        self.batches = BatchBuilder(vocab_size, device)
        self.spec_totals = SpecTotals()
        self.num_generated_tokens = 0
        self.holds = False  # while it does, no round follows one that is on its way
        self.split: SplitPrompts | None = None  # set by engine/split_build.py
        self._make_decoder = make_decoder
        self._round_is_due = False

    # ---- requests in and out

    def add(self, req: Req) -> None:
        """Queue a request. Raises RequestError where it can never be served."""
        if req.rid in self.queues.by_rid:
            raise RequestError(f"request id {req.rid} is in use; choose another", "request_id")
        self.admission.check(req)
        if req.sampling.stop:
            req.stop_checker = StopStrings(req.sampling.stop, self._make_decoder(req.sampling))
        self.queues.add(req)

    def abort(self, rid: str, why: str | None = None) -> None:
        """End a request, wherever it is. Unknown and finished ones are ignored."""
        if (req := self.queues.by_rid.get(rid)) is not None:
            self.lifecycle.finish(req, FinishReason("abort", message=why))

    def forget_kv(self) -> int:
        """Free all KV memory: what it holds follows from weights that are gone. Requests go back to
        their queue and write theirs again, what they have emitted included. No round is on its way.
        Returns the tokens that were forgotten."""
        cache = self.ledger.cache
        private = sum(req.kv_len - req.cached_len for req in self.queues.live)
        tokens = private + cache.evictable_size + cache.protected_size
        self.retract_all()
        self.ledger.evict_all()
        return tokens

    def retract_all(self) -> None:
        """Requests go back to their queue. No round is on its way."""
        for req in sorted(self.queues.live, key=lambda one: one.rank, reverse=True):
            self.lifecycle.retract(req)

    def take_changed(self) -> list[Req]:
        """Requests that gained tokens or finished since the last call."""
        return self.lifecycle.take_changed()

    def take_released(self) -> list[Req]:
        """Requests that left the KV memory since the last call: finished, aborted or retracted.
        A drafter drops what it keeps for them, before it is seeded again."""
        return self.lifecycle.take_released()

    # ---- forwards

    def schedule(self) -> ScheduleBatch | None:
        """The next batch, its slots written to the page table. None where nothing can run; look at
        `has_work`, for requests may have finished instead."""
        if self._round_is_due:
            batch = self._decode() or self._prefill()
        else:
            batch = self._prefill() or self._decode()
        self._round_is_due = batch is not None and batch.forward_mode in _BEFORE_ROUNDS
        self._flush()
        return batch

    def follow(self, reqs: list[Req], slots: int) -> list[Req]:
        """Which requests, whose round is in flight, to run a further round of before that one's
        outcome is known, with slots for `slots` tokens more than are committed; none, where
        something else is to run first or memory is short."""
        if self.holds or self._prompt_is_due():
            return []
        going = self.policy.going_on(reqs)
        if not self.rounds.reserve_unseen(going, slots):
            return []
        self._flush()
        return going

    def round_limit(self, req: Req) -> int:
        """The most nodes the request may verify in the round just scheduled, root included: what
        it has slots for, and no more tokens than it may still emit."""
        return min(
            self.policy.max_nodes,
            self.policy.remaining_tokens(req),
            req.reserved_len - req.kv_len,
        )

    def commit_prefill(self, batch: ScheduleBatch, result: PrefillResult) -> None:
        """Take the outcome of an EXTEND, MIXED or SPLIT_PREFILL batch. Requests aborted meanwhile
        are skipped."""
        self.admission.pace.end(sum(batch.extend_lens))
        for index, req in enumerate(batch.reqs):
            self.queues.split.pop(req, None)
            if req.is_finished:
                continue
            token, logprob = result.tokens[index], result.logprobs[index]
            tokens = [token] if token is not None else []
            logprobs = [logprob] if logprob is not None else []
            if req.state is ReqState.RUNNING:
                self._commit_run(req, tokens, logprobs, drafted=0)
                self.spec_totals.num_rounds += 1
                continue
            req.prompt_logprobs += result.prompt_logprobs[index]
            self._commit_chunk(req, batch.extend_lens[index])
            if tokens:
                self._emit(req, tokens, logprobs, find_cut(req, tokens, self.policy.context_len))

    def commit_round(self, reqs: list[Req], result: VerifyResult) -> None:
        """Take the outcome of a round. The KV of accepted nodes lies where a chain would have
        written it. Requests that ended meanwhile are skipped."""
        drafts: list[int] = []
        accepted: list[int] = []
        num_rounds = 0
        logprobs = [[]] * len(reqs) if result.logprobs is None else result.logprobs
        outcomes = zip(reqs, result.tokens, result.num_drafted, logprobs, strict=True)
        for req, tokens, drafted, own in outcomes:
            if req.state is not ReqState.FINISHED:
                req.spec.is_lossy |= result.is_lossy
                kept = self._commit_run(req, tokens, own, drafted, result.depth)
                num_rounds += 1
                if drafted:
                    drafts.append(drafted)
                    accepted.append(kept - 1)
        self.spec_totals.record(num_rounds, drafts, accepted)

    # ---- state

    @property
    def has_work(self) -> bool:
        return bool(self.queues.by_rid)

    @property
    def num_running(self) -> int:
        """Requests that hold KV memory."""
        return self.queues.num_live

    @property
    def num_waiting(self) -> int:
        return len(self.queues.waiting)

    @property
    def num_slots(self) -> int:
        return self.ledger.capacity

    @property
    def num_free_slots(self) -> int:
        """Slots that no request holds; those that the cache would give up count."""
        return self.ledger.obtainable

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of requests admitted since start."""
        return self.admission.num_prompt_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache."""
        return self.admission.num_cached_tokens

    @property
    def num_retractions(self) -> int:
        return self.lifecycle.num_retractions

    def check_invariant(self) -> None:
        """Raise InvariantError, with the numbers, unless every slot and row is accounted for."""
        self.ledger.check(self.queues.live)
        for req in self.queues.running:
            if req.kv_len != req.seq_len - 1:
                raise InvariantError(
                    f"running request {req.rid} has {req.seq_len} tokens and KV of {req.kv_len}"
                )
        if (queued := self.num_waiting + self.num_running) != len(self.queues.by_rid):
            raise InvariantError(f"{len(self.queues.by_rid)} requests, {queued} of them queued")

    # ---- steps

    def _flush(self) -> None:
        """What was released may be given to others from here on, on the device as well."""
        if self.split is not None:
            self.split.settle()
        self.ledger.flush()

    def _prompt_is_due(self) -> bool:
        """Whether a prompt is to run, or to be committed, before another round."""
        queues = self.queues
        if self.split is not None and self.split.is_ready:
            return True
        if (
            self.split is not None
            and self.split.is_full(queues)
            and not self.split.has_short(queues)
        ):
            return False
        return self._would_admit() or len(queues.prefilling) > len(queues.split)

    def _would_admit(self) -> bool:
        """Whether a waiting request may find a row: a free one, or one that is given up for it."""
        if not self.queues.waiting:
            return False
        if self.ledger.rows.num_free:
            return True
        (first,) = self.queues.in_turn(1)
        return self.queues.overtaken(first) is not None

    def _prefill(self) -> ScheduleBatch | None:
        if not self.queues.waiting and not self.queues.prefilling:
            return None
        if self.split is not None:
            return self._split_prefill(self.split)
        mixed = self.policy.enable_mixed_chunk
        if mixed:
            self.rounds.reserve(slots=1)
        chunks = self.admission.plan()
        if not chunks:
            return None
        return self.batches.prefill(chunks, riders=list(self.queues.running) if mixed else [])

    def _split_prefill(self, split: SplitPrompts) -> ScheduleBatch | None:
        """Short prompts go between two rounds, others beside them."""
        below = split.min_tokens if split.is_full(self.queues) else None
        chunks = self.admission.plan(split.most_together, below)
        if not chunks:
            return None
        is_long = sum(chunk.length for chunk in chunks) >= split.min_tokens
        is_split = is_long and not split.runs_whole()
        batch = self.batches.prefill(chunks, riders=[], is_split=is_split)
        if is_split:
            self.queues.split |= dict.fromkeys(batch.reqs, batch)
        return batch

    def _decode(self) -> ScheduleBatch | None:
        self.rounds.reserve(self.policy.round_slots)
        return self.batches.decode(self.queues.running) if self.queues.running else None

    def _commit_chunk(self, req: Req, length: int) -> None:
        self.ledger.commit(req, length)
        self.ledger.share(req)
        if req.kv_len == req.prefill_len:
            self.queues.start_running(req)

    def _commit_run(
        self,
        req: Req,
        tokens: list[int],
        logprobs: list[TokenLogprob],
        drafted: int,
        depth: DepthChoice | None = None,
    ) -> int:
        """The tokens of one round. With each token that is kept, the KV of the token before it is
        kept too: the root's with the first. Returns how many are kept."""
        cut = find_cut(req, tokens, self.policy.context_len)
        kept = cut[0]
        self.ledger.commit(req, kept)
        req.spec.record(drafted, kept - 1, depth)
        self._emit(req, tokens, logprobs, cut)
        return kept

    def _emit(self, req: Req, tokens: list[int], logprobs: list[TokenLogprob], cut: Cut) -> None:
        kept, reason = cut
        req.output_ids += tokens if kept == len(tokens) else tokens[:kept]
        if logprobs:
            req.logprobs += logprobs[:kept]
        self.num_generated_tokens += kept
        if req.first_token_time is None:
            req.first_token_time = monotonic()
        self.lifecycle.note_change(req)
        if reason is not None:
            self.lifecycle.finish(req, reason)
