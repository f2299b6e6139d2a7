"""The engine: schedule, run, commit, hand out what came of it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from specengine.core.batch import ScheduleBatch
from specengine.core.errors import RequestError
from specengine.core.interfaces import LogitsOutput
from specengine.core.random_streams import choice_seed
from specengine.core.request import Req, ReqState
from specengine.core.sampling import SamplingParams
from specengine.core.spec import VerifyResult
from specengine.engine.acceptance_watch import AcceptanceWatch
from specengine.engine.adaptive.state import DepthChooser, tell_depths
from specengine.engine.grammar.state import LlguidanceState
from specengine.engine.intake import check_intake, start_grammar, within_context
from specengine.engine.lost_state import start_anew
from specengine.engine.new_weights import RunningWeights
from specengine.engine.outgoing import ENDED_BY_OPERATOR, Choice, is_named, owner_of
from specengine.engine.outputs import EngineStats, RequestOutput
from specengine.engine.parts import EngineParts
from specengine.engine.pipeline import RoundPipeline
from specengine.engine.pooler import Pooler, pool_prefill
from specengine.engine.prefill import take_prefill
from specengine.engine.round.executor import RoundExecutor
from specengine.engine.round.host import HostRound
from specengine.engine.sharing import meet_for, shared_step
from specengine.engine.sleep import Sleeper
from specengine.engine.split_prefill import SplitPrefills
from specengine.engine.stats import engine_stats
from specengine.runner.fallbacks import NoGraphs, count_fallback


class Engine:
    """Serves requests on one thread: add_request, then step (or advance) while has_work."""

    def __init__(self, parts: EngineParts) -> None:
        self.parts = parts
        self.scheduler = parts.scheduler
        self.drafter = parts.drafter
        self.host_round = HostRound(parts.worker, parts.drafter, parts.verifier)
        # Set by build.build_engine, or what it calls, in this order, before any request:
        self.weights: RunningWeights | None = None
        self.sleeper = Sleeper()
        self.ragged_counters: dict[str, Counter[str]] = {}
        self.split: SplitPrefills | None = None  # split_build.add_split_prefills
        self.no_rounds: NoGraphs | None = None  # build._capture: why rounds run on the host
        self.pipeline: RoundPipeline | None = None  # build._capture: rounds on the device
        self.at_end: Callable[[], object] = lambda: None  # cost_facts.keep_at_the_end

        self.keeps_turning = parts.sharers is not None  # it steps without work as well
        self.watch = AcceptanceWatch()
        self.choices: dict[Req, Choice] = {}
        self.seeds = random.Random(parts.config.model.random_seed)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work and not self.sleeper.is_asleep

    def check(self) -> None:
        """Raises EngineStoppedError where it cannot go on."""

    def call_if_stopped(self, tell: Callable[[], object]) -> None:
        """Call `tell`, from any thread, if the engine stops by itself: `check` says why."""

    def close(self) -> None:
        """Nothing runs afterwards. Learned costs of rounds are kept, where a file was named."""
        self.at_end()

    def add_request(
        self,
        rid: str,
        prompt_ids: list[int],
        sampling: SamplingParams,
        stream: bool = True,
        grammar: LlguidanceState | None = None,
    ) -> None:
        """Queue a prompt; n > 1 queues as many choices of it. stream: hand tokens out as they come,
        not only when a choice has ended, which spares the host most of its work. grammar: the
        beginning of sampling.grammar; where it is missing, this call compiles it.

        Raises RequestError where the request cannot be served; then nothing was queued.
        """
        self.sleeper.require_awake()
        check_intake(self.parts, prompt_ids, sampling)
        sampling = within_context(self.parts, prompt_ids, sampling)
        base = self.seeds.getrandbits(62) if sampling.seed is None else sampling.seed
        for index in range(sampling.n):
            req = Req(
                rid=f"{rid}#{index}",
                prompt_ids=prompt_ids,
                sampling=sampling,
                eos_ids=self.parts.eos_ids,
                seed=choice_seed(base, index),
                grammar=start_grammar(self.parts, sampling, grammar),
                owner=owner_of(rid),
            )
            self.scheduler.add(req)
            self.choices[req] = Choice(req, rid, index, self.parts.tokenizer, stream)

    def add_embedding(self, rid: str, prompt_ids: list[int]) -> None:
        """Queue a prompt whose vector is wanted; its one output has it. Raises RequestError."""
        pooling = self.parts.pooling
        if pooling is None:
            raise RequestError(f"{self.parts.model_name} is not an embedding model", "model")
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        self.sleeper.require_awake()
        check_intake(self.parts, prompt_ids, sampling)
        req = Req(f"{rid}#0", prompt_ids, sampling, needs_all_rows=pooling.needs_all)
        self.scheduler.add(req)
        self.choices[req] = Choice(req, rid, 0, self.parts.tokenizer, False, Pooler(pooling))

    def abort(self, rid: str) -> None:
        """Stop every choice of a request and free its KV. Unknown ids are ignored."""
        for choice in [c for c in self.choices.values() if c.rid == rid]:
            self.scheduler.abort(choice.req.rid)
            del self.choices[choice.req]

    def give_up(self, names: Sequence[str] | None = None) -> int:
        """End requests as an operator asks; None ends all. Their callers get what there is, with
        the reason "abort", from the next `step`. Returns how many requests end."""
        chosen = {c.rid for c in self.choices.values() if names is None or is_named(c.rid, names)}
        for choice in self.choices.values():
            if choice.rid in chosen:
                self.scheduler.abort(choice.req.rid, ENDED_BY_OPERATOR)
        return len(chosen)

    def flush_cache(self) -> int:
        """Forget the KV of all prefixes that no request holds. Returns their tokens."""
        before = self.scheduler.ledger.cache.evictable_size
        self.scheduler.ledger.evict_all()
        return before

    def update_weights(self, model: str | None = None, draft_model: str | None = None) -> int:
        """Other weights for the model, its drafter or both, from where `--model` and
        `--speculative-draft-model-path` could name them; graphs stay valid. Unfinished requests go
        on with the new weights from the tokens they have. Returns the tokens of KV forgotten.

        Raises ConfigError or ModelLoadError where they do not fit, and changes nothing then.
        """
        assert self.weights is not None, "set by build.build_engine"
        self.sleeper.require_awake()
        self._meet(f"weights {model} {draft_model}")
        new = self.weights.read(model, draft_model)
        self.finish_rounds()
        self.weights.put(new)
        tokens = self.scheduler.forget_kv()
        self._release_requests()
        return tokens

    def sleep(self, level: int = 1) -> int:
        """Give the memory of weights and KV back: Sleeper.sleep. Unfinished requests wait, and go
        on with the same tokens after `wake`; new ones are refused until then."""
        self._meet(f"sleep {level}")
        self.sleeper.check(level)
        self.finish_rounds()
        self.scheduler.forget_kv()
        self._release_requests()
        return self.sleeper.sleep(level)

    def wake(self) -> None:
        """Sleeper.wake."""
        self._meet("wake")
        self.sleeper.wake()

    def _meet(self, what: str) -> None:
        """Waits for engines that share experts: sharing.meet_for."""
        if self.parts.sharers is not None:
            self.finish_rounds()
            meet_for(self.parts.sharers, what)

    def finish_rounds(self) -> None:
        """Collect the round in flight, and let none follow."""
        self.scheduler.holds = True
        try:
            while self.pipeline is not None and self.pipeline.has_in_flight:
                self._collect(self.pipeline)
            if self.split is not None:
                self.split.abandon()
        finally:
            self.scheduler.holds = False

    def step(self) -> list[RequestOutput]:
        """As `advance`; gives what its requests gained, with its text."""
        return [choice.take_output() for choice in self.advance()]

    def advance(self) -> list[Choice]:
        """Runs a prefill or a round, and gives the choices that gained tokens or have ended; of
        those that do not stream, the ended ones.

        A call either collects and commits the round that was launched before, or schedules
        and launches: never both. The pipeline may launch the next round amid the former.
        """
        shared_step(self.parts.sharers, self._advance, lambda: self.has_work)
        return self.take_changed()

    def _advance(self) -> None:
        try:
            if self.split is not None:
                self.split.advance()
            if self.pipeline is not None and self.pipeline.has_in_flight:
                self._collect(self.pipeline)
                return
            batch = self._next_batch()
            self._release_requests()
            if batch is not None:
                if batch.forward_mode.is_prefill():
                    self._prefill(batch)
                elif self.pipeline is not None and self._runs_on_device(self.pipeline, batch):
                    self.pipeline.launch(batch)
                else:
                    self._commit(batch.reqs, self._run(batch))
                self._release_requests()
        except BaseException:
            start_anew(self.scheduler, self.pipeline)
            raise

    def _collect(self, pipeline: RoundPipeline) -> None:
        done = pipeline.collect()
        self._commit(done.reqs, done.result)
        pipeline.send_masks()

    def use_idle_moment(
        self, may_capture: bool = True, is_wanted: Callable[[], bool] = lambda: False
    ) -> bool:
        """While there is no work: does a piece of what can be done then, a capture if may_capture.
        False: there is nothing more to do until a request comes. is_wanted: asked amid a capture,
        which ends early where it holds. Sharers of experts capture when one first needs a graph."""
        if self.pipeline is None or self.sleeper.is_asleep or self.parts.sharers is not None:
            return False
        if self.pipeline.has_in_flight:  # its requests have ended: no choice gains anything
            self.advance()
            return True
        may_capture = may_capture and not self.host_round.why_watched
        return may_capture and self.pipeline.capture_while_idle(is_wanted)

    def _run(self, batch: ScheduleBatch) -> VerifyResult:
        """On the host. Rounds that are recorded keep their depth."""
        if self.pipeline is not None:
            self.pipeline.interrupt()
        elif self.no_rounds is not None:
            self.no_rounds.count()
        if self.parts.adaptive is None or self.host_round.recorders:
            return self.host_round.run(batch)
        return self.parts.adaptive.run(self.host_round, batch)

    def _runs_on_device(self, pipeline: RoundPipeline, batch: ScheduleBatch) -> bool:
        if (reason := self.host_round.why_watched) is not None:
            count_fallback(pipeline.executor.counters, "round", reason)
            return False
        return pipeline.executor.can_run(batch)

    def _commit(self, reqs: list[Req], result: VerifyResult) -> None:
        if result.depth is None:
            result.depth = self.parts.fixed_depth
        self.scheduler.commit_round(reqs, result)
        self.watch.check(self.scheduler.spec_totals)
        if self.split is not None:
            self.split.saw_round(reqs)
        self._release_requests()

    def stats(self) -> EngineStats:
        rounds = self.device_rounds or self.no_rounds
        return engine_stats(self.parts, rounds, self.ragged_counters, self.choosers(), self.split)

    @property
    def device_rounds(self) -> RoundExecutor | None:
        return None if self.pipeline is None else self.pipeline.executor

    def choosers(self) -> Iterator[DepthChooser]:
        if self.pipeline is not None and self.pipeline.depths.chooser is not None:
            yield self.pipeline.depths.chooser
        if self.parts.adaptive is not None:
            yield self.parts.adaptive.chooser

    def _prefill(self, batch: ScheduleBatch) -> None:
        if self.pipeline is not None:
            self.pipeline.interrupt(batch)
        output = self.parts.worker.forward_batch_generation(batch.get_model_worker_batch())
        if self.parts.pooling is not None:
            choices = (self.choices.get(req) for req in batch.reqs)
            pool_prefill([one.pooler if one else None for one in choices], batch, output)
        take_prefill(self.parts, batch, output)

    def _next_batch(self) -> ScheduleBatch | None:
        if self.sleeper.is_asleep:
            return None
        if self.split is None:
            return self.scheduler.schedule()
        return self.split.next_batch(self._take_split)

    def _take_split(self, batch: ScheduleBatch, output: LogitsOutput) -> None:
        if self.pipeline is not None:
            self.pipeline.interrupt(batch)
        take_prefill(self.parts, batch, output)
        self._release_requests()

    def _release_requests(self) -> None:
        for req in self.scheduler.take_released():
            self.drafter.release(req)

    def take_changed(self) -> list[Choice]:
        """Choices that gained tokens or have ended since the last call, or the last step."""
        changed, ended = [], []
        for req in self.scheduler.take_changed():
            choice = self.choices.get(req)
            if choice is None:
                continue
            if req.state is ReqState.FINISHED:
                del self.choices[req]
                ended.append(req)
            elif not choice.streams:
                continue
            changed.append(choice)
        tell_depths(ended, list(self.choosers()))
        return changed
