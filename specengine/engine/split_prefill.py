"""Prompts that run a few layers at a time beside rounds (ForwardMode.SPLIT_PREFILL)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from time import perf_counter

import torch
from torch import Tensor

from specengine.core.batch import AttentionBackend, ForwardBatch, ScheduleBatch
from specengine.core.interfaces import LogitsOutput
from specengine.core.parallel import Link, NoLink
from specengine.core.request import Req
from specengine.core.transfer import int64, sent
from specengine.engine.round.lanes import RoundLanes
from specengine.runner.fallbacks import HOOKED, count_fallback
from specengine.runner.model_runner import ModelRunner
from specengine.runner.split_streams import Call, SplitStreams
from specengine.scheduler.scheduler import Scheduler
from specengine.scheduler.split_policy import PromptQueue, SplitDecision, SplitPrefillPolicy
from specengine.scheduler.split_prompts import SplitPrompts, waiting_tokens

TakeOutput = Callable[[ScheduleBatch, LogitsOutput], None]


@dataclass(eq=False)
class SplitJob:
    """A forward under way. Its state is on the batch. kept: places of the requests that have not
    left it."""

    batch: ScheduleBatch
    on_device: ForwardBatch
    kept: list[int]
    hidden: Tensor | None = None  # [T, H], after the last layer
    last: Call | None = None

    @property
    def num_tokens(self) -> int:
        return sum(self.batch.extend_lens)

    @property
    def is_done(self) -> bool:
        return self.hidden is not None and self.last is not None and self.last.is_done

    @property
    def rank(self) -> tuple[int, int]:
        return min(self.batch.reqs[place].rank for place in self.kept)


@dataclass
class _Measured:
    """A call that is not measured yet."""

    call: Call
    decision: SplitDecision
    num_tokens: int


@dataclass
class SplitPrefills:
    """Launches the layers of prompts, those of the lowest rank first, and gives their outputs.

    attn_backend: of these prompts alone. no_shares: why they have no SMs of their own on a GPU.
    link: to other ranks, which launch as many layers as rank 0. They take turns with rounds.
    """

    runner: ModelRunner
    scheduler: Scheduler
    prompts: SplitPrompts
    policy: SplitPrefillPolicy
    streams: SplitStreams
    attn_backend: AttentionBackend
    no_shares: str | None = None
    link: Link = field(default_factory=NoLink)
    jobs: list[SplitJob] = field(default_factory=list)
    counters: Counter[str] = field(default_factory=Counter)
    decision: SplitDecision | None = None  # the last one
    lanes: RoundLanes | None = None  # of rounds on the device; set by split_build.use_lanes
    _running: list[_Measured] = field(default_factory=list)
    _round_ended: float | None = None  # the last one, if nothing but rounds has run since
    _beside: SplitDecision | None = None  # what ran while the round did
    _in_turn: float = 0.0  # seconds that calls have taken since

    def __post_init__(self) -> None:
        self.prompts.settle = self.settle
        self.prompts.runs_whole = lambda: self.runner.hooks.is_used
        self.scheduler.split = self.prompts

    # ---- the engine's steps

    def next_batch(self, take: TakeOutput) -> ScheduleBatch | None:
        """What runs next on the current stream, as Scheduler.schedule; no round is in flight. take:
        called with prompts whose last layer has run."""
        for job in [one for one in self.jobs if one.is_done]:
            self.interrupt()
            self._finish(job, take)
        batch = self.scheduler.schedule()
        while batch is not None and batch.forward_mode.is_split_prefill():
            self._start(batch)
            batch = self.scheduler.schedule()
        if batch is None or batch.forward_mode.is_prefill():
            self.interrupt()
            if batch is not None and sum(batch.extend_lens) >= self.prompts.min_tokens:
                count_fallback(self.counters, "split prefill", HOOKED)
        if batch is None and self._running:
            self._running[0].call.wait()  # there is nothing else to do
        return batch

    def advance(self) -> None:
        """Launch the next layers, if the last ones are done or nearly so. On a CPU they run."""
        self.settle()
        self._measure()
        while self.jobs and len(self._running) < self.streams.most_calls:
            unfinished = [one for one in self.jobs if one.hidden is None]
            if not unfinished:
                break
            self._launch(min(unfinished, key=lambda one: one.rank))
            if self.streams.takes_turns:
                break
        self._measure()
        self.prompts.is_ready = any(job.is_done for job in self.jobs)
        if self.lanes is not None:
            self.lanes.share = self.decision.share if self._running and self.decision else None

    def saw_round(self, reqs: Sequence[Req]) -> None:
        """A round of these has ended, and is committed."""
        now, batch_size = perf_counter(), len(reqs)
        for req in reqs:
            if req.is_finished and req.finish_time is not None and req.first_token_time is not None:
                self.policy.saw_answer(req.finish_time - req.first_token_time)
        if self._round_ended is not None:
            took = now - self._round_ended - self._in_turn
            self.policy.saw_round(batch_size, took, self._beside, self._in_turn)
        self._round_ended, self._in_turn = now, 0.0
        self._beside = self.decision if self._running else None

    def interrupt(self) -> None:
        """Something else than rounds runs, or nothing: the time until the next end of a round is no
        round's."""
        self._round_ended = None

    def abandon(self) -> None:
        """All prompts begin anew. Nothing is under way afterwards on the device either."""
        for job in list(self.jobs):
            self._give_back(job)
        for one in self._running:
            one.call.wait()
        self._running.clear()

    def share_all_sms(self, why: str) -> None:
        """Before any request: prompts have no SMs of their own. why: counted for each forward."""
        self.no_shares, self.policy.shares = why, ()
        self.streams.forget_shares()

    @property
    def is_busy(self) -> bool:
        return bool(self.jobs)

    # ---- the parts of a step

    def settle(self) -> None:
        """As SplitPrompts has it: requests that were aborted or retracted leave their forwards.
        Layers launched later do not write what they had, and those launched before run first."""
        split = self.scheduler.queues.split
        for job in list(self.jobs):
            kept = [i for i in job.kept if split.get(job.batch.reqs[i]) is job.batch]
            if kept == job.kept:
                continue
            self.streams.join()
            gone = [i for i in job.kept if i not in kept]
            self.counters["left"] += len(gone)
            job.kept = kept
            if not kept:
                self.jobs.remove(job)
            elif job.hidden is None:
                self.streams.launch(None, partial(_forget, job.on_device, gone))

    def _start(self, batch: ScheduleBatch) -> None:
        """All that the forward is told of its requests is read now: they may leave before its
        first layer."""
        self.streams.begin()
        try:
            on_device, _ = self.streams.launch(None, partial(self._send, batch))
        except BaseException:
            self._retract(batch)
            raise
        self.jobs.append(SplitJob(batch, on_device, list(range(batch.batch_size))))
        self.counters["prefills"] += 1
        self.counters["prompts"] += batch.batch_size
        if self.no_shares is not None:
            count_fallback(self.counters, "split prefill", self.no_shares)
        self.advance()

    def _launch(self, job: SplitJob) -> None:
        decision = self.decision = self._decide(job)
        self.counters["calls"] += 1
        self.counters["layers"] += decision.layers
        try:
            job.hidden, job.last = self.streams.launch(
                decision.share,
                partial(self.runner.split_layers, job.on_device, decision.layers),
            )
        except BaseException:
            self._give_back(job)
            raise
        if self.streams.takes_turns:
            self._in_turn += job.last.seconds
        else:
            self._beside = decision
        self._running.append(_Measured(job.last, decision, job.num_tokens))

    def _decide(self, job: SplitJob) -> SplitDecision:
        others = [one for one in self.jobs if one is not job and one.hidden is None]
        waiting = waiting_tokens(self.scheduler.queues) + sum(one.num_tokens for one in others)
        left = self.runner.model.num_layers - job.on_device.split_index
        queue = PromptQueue(job.num_tokens, left, waiting)
        made: list[SplitDecision] = []

        def choose() -> tuple[int]:
            """On rank 0 alone: by its clock."""
            made.append(self.policy.decide(queue, len(self.scheduler.queues.running)))
            return (made[0].layers,)

        (layers,) = self.link.decide(choose)
        return made[0] if made else SplitDecision(layers, None, "as rank 0 has chosen")

    @torch.inference_mode()
    def _send(self, batch: ScheduleBatch) -> ForwardBatch:
        return self.runner.new_forward_batch(batch.get_model_worker_batch(), self.attn_backend)

    def _measure(self) -> None:
        while self._running and self._running[0].call.is_done:
            done = self._running.pop(0)
            self.policy.saw_layers(done.decision, done.num_tokens, done.call.seconds)

    def _finish(self, job: SplitJob, take: TakeOutput) -> None:
        self.jobs.remove(job)
        self.prompts.is_ready = any(one.is_done for one in self.jobs)
        try:
            take(*self._output(job))
        except BaseException:
            self._give_back(job)
            raise

    @torch.inference_mode()
    def _output(self, job: SplitJob) -> tuple[ScheduleBatch, LogitsOutput]:
        """Of the requests that have not left."""
        batch, on_device, hidden = job.batch, job.on_device, job.hidden
        assert hidden is not None
        self.streams.hand_over([hidden, *on_device.layer_features])
        if len(job.kept) < batch.batch_size:
            rows = sent(int64(_rows(batch, job.kept)), hidden.device)
            batch, hidden = self.scheduler.batches.narrowed(batch, job.kept), hidden[rows]
            on_device.layer_features = [one[rows] for one in on_device.layer_features]
        wanted = batch.get_model_worker_batch().logits_rows
        on_device.logits_rows = sent(int64(wanted or []), hidden.device)
        return batch, self.runner.logits(hidden, on_device)

    def _give_back(self, job: SplitJob) -> None:
        """Its requests begin anew: of what its layers wrote, some may have been written twice."""
        self._retract(job.batch)
        self.settle()
        if job in self.jobs:
            self.jobs.remove(job)

    def _retract(self, batch: ScheduleBatch) -> None:
        split = self.scheduler.queues.split
        for req in [one for one in batch.reqs if split.get(one) is batch]:
            self.scheduler.lifecycle.retract(req)


def _rows(batch: ScheduleBatch, places: list[int]) -> list[int]:
    """Of the tokens of these requests."""
    ends = [*accumulate(batch.extend_lens)]
    return [row for i in places for row in range(ends[i] - batch.extend_lens[i], ends[i])]


@torch.inference_mode()
def _forget(batch: ForwardBatch, places: list[int]) -> None:
    """Layers to come write these requests' keys and values to slot 0, which no request owns."""
    ends = [*accumulate(batch.extend_lens_cpu)]
    for place in places:
        batch.out_cache_loc[ends[place] - batch.extend_lens_cpu[place] : ends[place]] = 0
