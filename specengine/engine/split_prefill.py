"""Prompts that run a few layers at a time, in turns with rounds or beside them
(ForwardMode.SPLIT_PREFILL)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

import torch

from specengine.core.batch import AttentionBackend, ForwardBatch, ScheduleBatch
from specengine.core.interfaces import LogitsOutput
from specengine.core.parallel import AS_RANK_0, Link, NoLink, chosen_on_rank_0
from specengine.core.request import Req
from specengine.core.transfer import int64, sent
from specengine.engine.round.lanes import RoundLanes
from specengine.engine.split_job import SplitJob
from specengine.runner.fallbacks import HOOKED, count_fallback
from specengine.runner.model_runner import ModelRunner
from specengine.runner.split_streams import Call, SplitStreams
from specengine.scheduler.scheduler import Scheduler
from specengine.scheduler.split_policy import PromptQueue, SplitDecision, SplitPrefillPolicy
from specengine.scheduler.split_prompts import SplitPrompts, waiting_tokens

TakeOutput = Callable[[ScheduleBatch, LogitsOutput], None]


@dataclass
class _Measured:
    """A call that is not measured yet. decision: None is what followed the last layer."""

    call: Call
    decision: SplitDecision | None
    num_tokens: int

    @property
    def is_beside(self) -> bool:
        """Whether rounds run meanwhile."""
        return self.decision is not None and self.decision.share is not None


@dataclass
class SplitPrefills:
    """Launches the layers of prompts, those of the lowest rank first, and gives their outputs.

    A turn is a call on all SMs between two rounds. It is launched before the second of them is, at
    most one for each round, and the host waits for neither: the device goes from one to the other.

    attn_backend: of these prompts alone. no_shares: why they have no SMs of their own on a GPU.
    link: to other ranks, which launch as many layers as rank 0. is_in_flight: whether a round is
    launched and not committed; set by split_build.join_pipeline.
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
    is_in_flight: Callable[[], bool] = lambda: False
    _running: list[_Measured] = field(default_factory=list)
    _num_rounds: int = 0  # that were committed
    _turn_after: int | None = None  # how many rounds had been launched before the last turn
    _round_ended: float | None = None  # the last one, if nothing but rounds has run since
    _beside: SplitDecision | None = None  # what ran while the round did
    _in_turn: float = 0.0  # seconds of turns that the policy has not observed

    def __post_init__(self) -> None:
        self.prompts.settle = self.settle
        self.prompts.runs_whole = lambda: self.runner.hooks.is_used
        self.scheduler.split = self.prompts

    # ---- the engine's steps

    def next_batch(self, take: TakeOutput) -> ScheduleBatch | None:
        """What runs next on the current stream, as Scheduler.schedule; no round is in flight. take:
        called with prompts whose last layer has run."""
        while True:
            for job in [one for one in self.jobs if one.is_ready]:
                self.interrupt()
                self._finish(job, take)
            batch = self.scheduler.schedule()
            if batch is None or not batch.forward_mode.is_split_prefill():
                break
            self._start(batch)
        if batch is None or batch.forward_mode.is_prefill():
            self.interrupt()
            if batch is not None and sum(batch.extend_lens) >= self.prompts.min_tokens:
                count_fallback(self.counters, "split prefill", HOOKED)
        if batch is None and self._running:
            self._running[0].call.wait()  # there is nothing else to do
        return batch

    def advance(self) -> None:
        """Launch the next layers: in turn, if a round was launched since the last turn or none
        runs; beside rounds, if the last ones are done or nearly so. On a CPU they run."""
        self.settle()
        self._measure()
        while unfinished := [one for one in self.jobs if one.hidden is None]:
            if not self.policy.shares and not self._turn_is_due:
                break
            job = min(unfinished, key=lambda one: one.rank)
            decision = self._decide(job)
            if not decision.layers or not self._may_launch(decision):
                break
            self._launch(job, decision)
            if decision.share is None:
                break
        self._measure()
        self.prompts.is_ready = any(job.is_ready for job in self.jobs)
        if self.lanes is not None:
            self.lanes.share = self.decision.share if self._runs_beside and self.decision else None

    def saw_round(self, reqs: Sequence[Req]) -> None:
        """A round of these has ended, and is committed."""
        self._measure()
        now, batch_size = perf_counter(), len(reqs)
        for req in reqs:
            if req.is_finished and req.finish_time is not None and req.first_token_time is not None:
                self.policy.saw_answer(req.finish_time - req.first_token_time)
        took = 0.0 if self._round_ended is None else now - self._round_ended - self._in_turn
        if took > 0.0:
            self.policy.saw_round(batch_size, took, self._beside, self._in_turn)
        elif self._in_turn:
            self.policy.saw_delay(self._in_turn)
        self._num_rounds += 1
        self._round_ended, self._in_turn = now, 0.0
        self._beside = self.decision if self._runs_beside else None

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

    @property
    def _runs_beside(self) -> int:
        """Calls beside rounds that were not done yet."""
        return sum(one.is_beside for one in self._running)

    @property
    def _num_launched(self) -> int:
        """Rounds so far."""
        return self._num_rounds + self.is_in_flight()

    @property
    def _turn_is_due(self) -> bool:
        return not self.scheduler.queues.running or self._num_launched != self._turn_after

    def _may_launch(self, decision: SplitDecision) -> bool:
        if decision.share is not None:
            return self._runs_beside < self.streams.most_calls
        # A turn waits for what runs beside rounds, and they would wait for it.
        return self._turn_is_due and not self._runs_beside

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
                self.streams.launch(None, partial(job.forget, gone))

    def _start(self, batch: ScheduleBatch) -> None:
        """All that the forward needs of its requests is read now: they may leave before its
        first layer."""
        self.interrupt()
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

    def _launch(self, job: SplitJob, decision: SplitDecision) -> None:
        self.decision = decision
        self.counters["calls"] += 1
        self.counters["layers"] += decision.layers
        run = partial(self.runner.split_layers, job.on_device, decision.layers)
        try:
            if decision.share is None:
                self.counters["turns"] += 1
                self._turn_after = self._num_launched
                job.hidden, job.last = self.streams.take_turn(run)
            else:
                job.hidden, job.last = self.streams.launch(decision.share, run)
                self._beside = decision
        except BaseException:
            self._give_back(job)
            raise
        self._running.append(_Measured(job.last, decision, job.num_tokens))

    def _decide(self, job: SplitJob) -> SplitDecision:
        others = [one for one in self.jobs if one is not job and one.hidden is None]
        waiting = waiting_tokens(self.scheduler.queues) + sum(one.num_tokens for one in others)
        left = self.runner.model.num_layers - job.on_device.split_index
        queue = PromptQueue(job.num_tokens, left, waiting)
        return chosen_on_rank_0(  # by its clock
            self.link,
            lambda: self.policy.decide(queue, len(self.scheduler.queues.running)),
            lambda decision: (decision.layers,),
            lambda layers: SplitDecision(layers, None, AS_RANK_0),
        )

    @torch.inference_mode()
    def _send(self, batch: ScheduleBatch) -> ForwardBatch:
        return self.runner.new_forward_batch(batch.get_model_worker_batch(), self.attn_backend)

    def _measure(self) -> None:
        while self._running and self._running[0].call.is_done:
            done = self._running.pop(0)
            seconds = done.call.seconds
            if done.decision is not None:
                self.policy.saw_layers(done.decision, done.num_tokens, seconds)
            if not done.is_beside:
                self._in_turn += seconds

    def _finish(self, job: SplitJob, take: TakeOutput) -> None:
        """The head, and what the drafter reads of the prompt: between two rounds, as a turn."""
        self.jobs.remove(job)
        self.prompts.is_ready = any(one.is_ready for one in self.jobs)
        try:
            _, call = self.streams.stay(lambda: take(*self._output(job)))
        except BaseException:
            self._give_back(job)
            raise
        self._running.append(_Measured(call, None, job.num_tokens))

    @torch.inference_mode()
    def _output(self, job: SplitJob) -> tuple[ScheduleBatch, LogitsOutput]:
        """Of the requests that have not left."""
        batch, on_device, hidden = job.batch, job.on_device, job.hidden
        assert hidden is not None
        self.streams.hand_over([hidden, *on_device.layer_features])
        if len(job.kept) < batch.batch_size:
            rows = sent(int64(job.kept_rows), hidden.device)
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
