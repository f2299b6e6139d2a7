"""The engine: schedule, run, commit, hand out what came of it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from torch import Tensor

from specengine.core.batch import ScheduleBatch
from specengine.core.config import EngineConfig
from specengine.core.errors import QueueFullError, RequestError
from specengine.core.grammar import GrammarState
from specengine.core.interfaces import LogitsOutput
from specengine.core.random_streams import choice_seed
from specengine.core.request import Req, ReqState
from specengine.core.sampling import SamplingParams
from specengine.core.spec import (
    DepthChoice,
    Drafter,
    EarlyDrafter,
    PrefillResult,
    Verifier,
    VerifyResult,
)
from specengine.engine.acceptance_watch import AcceptanceWatch
from specengine.engine.adaptive.choose import Decision
from specengine.engine.adaptive.state import AdaptiveSteps
from specengine.engine.adaptive_round import AdaptiveRound
from specengine.engine.detokenizer import Detokenizer
from specengine.engine.flights import Flights
from specengine.engine.grammar.compiler import GrammarCompiler
from specengine.engine.grammar.masks import masked_prefill
from specengine.engine.graph_round import GraphRound
from specengine.engine.outgoing import Choice
from specengine.engine.outputs import EngineStats, RequestOutput
from specengine.engine.round import SpeculativeRound
from specengine.runner.graph_counters import GraphStats, NoGraphs, count_fallback
from specengine.runner.worker import TpModelWorker
from specengine.scheduler.scheduler import Scheduler

# With first tokens, as EarlyDrafter.seed_early: where it is given, nobody else seeds the drafter.
SeedEarly = Callable[[Tensor], None]


@dataclass(frozen=True)
class EngineParts:
    """The concrete pieces that build.py chose."""

    config: EngineConfig
    model_name: str
    tokenizer: Any  # transformers' fast tokenizer
    eos_ids: frozenset[int]
    vocab_size: int
    context_length: int
    worker: TpModelWorker
    scheduler: Scheduler
    drafter: Drafter
    verifier: Verifier
    sample_prefill: Callable[[LogitsOutput, ScheduleBatch, SeedEarly | None], PrefillResult]
    grammars: GrammarCompiler
    fixed_depth: Decision  # of rounds for which none is chosen
    adaptive: AdaptiveRound | None = None


class Engine:
    """Serves requests on one thread: add_request, then step while has_work."""

    def __init__(self, parts: EngineParts) -> None:
        self.parts = parts
        self.scheduler = parts.scheduler
        self.drafter = parts.drafter
        drafter = parts.drafter
        early = isinstance(drafter, EarlyDrafter) and drafter.seeds_early
        self._early = cast(EarlyDrafter, drafter) if early else None
        self.round = SpeculativeRound(parts.worker, parts.drafter, parts.verifier)
        self.flights: Flights | None = None  # set by build.py, where the device runs whole rounds
        self.no_rounds: NoGraphs | None = None  # likewise, where it could but for one reason
        self.at_end: Callable[[], object] = lambda: None  # likewise
        self.ragged_counters: dict[str, Counter[str]] = {}  # likewise
        self.watch = AcceptanceWatch()
        self.choices: dict[Req, Choice] = {}
        self.seeds = random.Random(parts.config.model.random_seed)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def close(self) -> None:
        """Nothing runs after it: what the rounds have taught is kept, where a file was named."""
        self.at_end()

    def add_request(
        self, rid: str, prompt_ids: list[int], sampling: SamplingParams, stream: bool = True
    ) -> None:
        """Queue a prompt; n > 1 queues as many choices of it. stream: hand tokens out as they come,
        not only when a choice has ended, which spares the host most of its work.

        Raises RequestError where the request cannot be served; then nothing was queued.
        """
        self._check(prompt_ids, sampling)
        room = max(self.parts.context_length - len(prompt_ids), 1)
        limit = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        least = min(sampling.min_tokens, limit)
        if (limit, least) != (sampling.max_tokens, sampling.min_tokens):
            sampling = replace(sampling, max_tokens=limit, min_tokens=least)
        base = self.seeds.getrandbits(62) if sampling.seed is None else sampling.seed
        for index in range(sampling.n):
            req = Req(
                rid=f"{rid}#{index}",
                prompt_ids=prompt_ids,
                sampling=sampling,
                eos_ids=self.parts.eos_ids,
                seed=choice_seed(base, index),
                grammar=self._start_grammar(sampling),
            )
            self.scheduler.add(req)
            detokenizer = Detokenizer(self.parts.tokenizer, sampling)
            self.choices[req] = Choice(req, rid, index, detokenizer, stream)

    def _start_grammar(self, sampling: SamplingParams) -> GrammarState | None:
        return None if sampling.grammar is None else self.parts.grammars.start(sampling.grammar)

    def _check(self, prompt_ids: list[int], sampling: SamplingParams) -> None:
        vocab = self.parts.vocab_size
        if prompt_ids and not 0 <= min(prompt_ids) <= max(prompt_ids) < vocab:
            raise RequestError(f"prompt token ids must lie in 0..{vocab - 1}", "prompt")
        sampling.check_vocab(vocab)
        queued = self.scheduler.num_waiting
        if queued + sampling.n > self.parts.config.schedule.max_queued_requests:
            raise QueueFullError(
                f"{queued} requests are waiting already; retry later, or raise "
                "--max-queued-requests"
            )

    def abort(self, rid: str) -> None:
        """Stop every choice of a request and free its KV. Unknown ids are ignored."""
        for choice in [c for c in self.choices.values() if c.rid == rid]:
            self.scheduler.abort(choice.req.rid)
            del self.choices[choice.req]

    def step(self) -> list[RequestOutput]:
        """One forward of the target: a prefill, or a round. Gives what its requests gained.

        Where a graph holds the whole round, the round after it is launched before it has landed.
        """
        if self.flights is not None and self.flights.in_the_air:
            landing = self.flights.land()
            self._commit(landing.reqs, landing.result)
            self.flights.send_masks()
            return self._collect()
        batch = self.scheduler.schedule()
        self._release_drafts()
        if batch is not None:
            if batch.forward_mode.is_prefill():
                self._prefill(batch)
            elif self.flights is not None and self._can_fly(self.flights, batch):
                self.flights.launch(batch)
            else:
                self._commit(batch.reqs, self._run(batch))
            self._release_drafts()
        return self._collect()

    def use_idle_moment(self, may_capture: bool = True) -> bool:
        """Where there is no work: whether there may be more to do than to wait for some.
        may_capture: graphs; a request that comes meanwhile waits for one, tens of ms."""
        if self.flights is None:
            return False
        if self.flights.in_the_air:  # of requests that have ended
            self.step()
            return True
        return may_capture and self.flights.prepare()

    def _run(self, batch: ScheduleBatch) -> VerifyResult:
        """Rounds that somebody looks at keep their depth."""
        if self.flights is not None:
            self.flights.interrupt()
        elif self.no_rounds is not None:
            self.no_rounds.count()
        adaptive = self.parts.adaptive
        if adaptive is None or self.round.recorders:
            return self.round.run(batch)
        return adaptive.run(self.round, batch)

    def _can_fly(self, flights: Flights, batch: ScheduleBatch) -> bool:
        if self.round.recorders:
            count_fallback(flights.graph_round.counters, "round", "somebody looks at rounds")
            return False
        return flights.graph_round.can_run(batch)

    def _commit(self, reqs: list[Req], result: VerifyResult) -> None:
        if result.depth is None:
            result.depth = self.parts.fixed_depth
        self.scheduler.commit_round(reqs, result)
        self.watch.check(self.scheduler.spec_totals)
        self._release_drafts()

    def stats(self) -> EngineStats:
        scheduler, graphs = self.scheduler, self._graph_stats()
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_slots=scheduler.num_slots,
            num_free_slots=scheduler.num_free_slots,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_cached_tokens=scheduler.num_cached_tokens,
            num_generated_tokens=scheduler.num_generated_tokens,
            num_retractions=scheduler.num_retractions,
            num_graph_forwards=sum(one.replays for one in graphs.values()),
            num_eager_forwards=self.parts.worker.runner.num_eager,
            graphs=graphs,
            spec=scheduler.spec_totals,
            depth=self._depth_in_use(),
        )

    @property
    def graph_round(self) -> GraphRound | None:
        return None if self.flights is None else self.flights.graph_round

    def _depth_in_use(self) -> Decision | None:
        """Of rounds on the device once there were any, else of the others."""
        found = (chooser.current for chooser in self.choosers())
        return next((one for one in found if one is not None), None)

    def choosers(self) -> Iterator[AdaptiveSteps]:
        if self.flights is not None and self.flights.depths is not None:
            yield self.flights.depths
        if self.parts.adaptive is not None:
            yield self.parts.adaptive.steps

    def _tell_depths(self, ended: list[Req]) -> None:
        """Once, to requests that have ended, and once for all that ended under the same choice:
        text is costly."""
        told: dict[int, DepthChoice] = {}  # by identity; `choices` keeps them alive
        choices = [req.spec.depth for req in ended]
        for req, choice in zip(ended, choices, strict=True):
            if choice is not None:
                if id(choice) not in told:
                    told[id(choice)] = self._told(choice)
                req.spec.depth = told[id(choice)]

    def _told(self, choice: DepthChoice) -> DepthChoice:
        for chooser in self.choosers():
            choice = chooser.resolved(choice)
        return choice

    def _graph_stats(self) -> dict[str, GraphStats]:
        runner, rounds = self.parts.worker.runner, self.graph_round or self.no_rounds
        prefills = runner.extend_graph or runner.no_extend_graphs
        kinds = {"decode": runner.graph, "prefill": prefills, "round": rounds}
        counters = {kind: one.counters for kind, one in kinds.items() if one is not None}
        counters |= self.ragged_counters
        return {kind: GraphStats.of(one) for kind, one in counters.items()}

    def _prefill(self, batch: ScheduleBatch) -> None:
        if self.flights is not None:
            self.flights.interrupt(batch)
        output = self.parts.worker.forward_batch_generation(batch.get_model_worker_batch())
        early = self._early_seed(batch, output)
        result = self.parts.sample_prefill(output, masked_prefill(batch), early)
        if early is None:
            self.drafter.seed(batch, output, result)
        self.scheduler.commit_prefill(batch, result)

    def _early_seed(self, batch: ScheduleBatch, output: LogitsOutput) -> SeedEarly | None:
        """For a drafter that can take first tokens from the device, where the host needs nothing
        else of the output."""
        params = [req.sampling for req in batch.reqs]
        tells = any(one.logprobs is not None or one.prompt_logprobs is not None for one in params)
        if self._early is None or tells or not any(batch.samples):
            return None
        return partial(self._early.seed_early, batch, output)

    def _release_drafts(self) -> None:
        for req in self.scheduler.take_released():
            self.drafter.release(req)

    def _collect(self) -> list[RequestOutput]:
        outputs, ended = [], []
        for req in self.scheduler.take_changed():
            choice = self.choices.get(req)
            if choice is None:
                continue
            if req.state is ReqState.FINISHED:
                del self.choices[req]
                ended.append(req)
            elif not choice.streams:
                continue
            outputs.append(choice.take_output())
        self._tell_depths(ended)
        return outputs
