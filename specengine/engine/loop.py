"""The engine: schedule, run, commit, hand out what came of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from specengine.core.batch import ScheduleBatch
from specengine.core.config import EngineConfig
from specengine.core.errors import QueueFullError, RequestError
from specengine.core.grammar import GrammarState
from specengine.core.interfaces import LogitsOutput
from specengine.core.request import Req
from specengine.core.sampling import SamplingParams
from specengine.core.spec import Drafter, PrefillResult, Verifier
from specengine.engine.acceptance_watch import AcceptanceWatch
from specengine.engine.detokenizer import Detokenizer
from specengine.engine.grammar.compiler import GrammarCompiler
from specengine.engine.grammar.masks import masked_prefill
from specengine.engine.outputs import EngineStats, RequestOutput, RequestTimes
from specengine.engine.round import SpeculativeRound
from specengine.runner.worker import TpModelWorker
from specengine.scheduler.scheduler import Scheduler


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
    sample_prefill: Callable[[LogitsOutput, ScheduleBatch], PrefillResult]
    grammars: GrammarCompiler


@dataclass(eq=False)
class Choice:
    """One request on its way out: what has been handed to the caller so far."""

    req: Req
    rid: str  # the caller's; choices of one n > 1 request share it
    index: int
    detokenizer: Detokenizer
    num_sent: int = 0

    def take_output(self) -> RequestOutput:
        req, start = self.req, self.num_sent
        self.num_sent = len(req.output_ids)
        new = req.output_ids[start:]
        delta = self.detokenizer.add(new, req.finish_reason)
        return RequestOutput(
            rid=self.rid,
            index=self.index,
            new_token_ids=new,
            token_ids=req.output_ids,
            text_delta=delta,
            text=self.detokenizer.text,
            finish_reason=req.finish_reason,
            logprobs=req.logprobs[start:],
            all_logprobs=req.logprobs,
            prompt_logprobs=req.prompt_logprobs,
            num_prompt_tokens=len(req.prompt_ids),
            num_cached_tokens=req.prefix_hit_len,
            spec=req.spec,
            times=RequestTimes(req.arrival_time, req.first_token_time, req.finish_time),
        )


class Engine:
    """Serves requests on one thread: add_request, then step while has_work."""

    def __init__(self, parts: EngineParts) -> None:
        self.parts = parts
        self.scheduler = parts.scheduler
        self.drafter = parts.drafter
        self.round = SpeculativeRound(parts.worker, parts.drafter, parts.verifier)
        self.watch = AcceptanceWatch()
        self.choices: dict[Req, Choice] = {}
        self.seeds = random.Random(parts.config.model.random_seed)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add_request(self, rid: str, prompt_ids: list[int], sampling: SamplingParams) -> None:
        """Queue a prompt; n > 1 queues as many choices of it.

        Raises RequestError where the request cannot be served; then nothing was queued.
        """
        self._check(prompt_ids, sampling)
        room = max(self.parts.context_length - len(prompt_ids), 1)
        limit = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        sampling = replace(sampling, max_tokens=limit, min_tokens=min(sampling.min_tokens, limit))
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
            self.choices[req] = Choice(req, rid, index, detokenizer)

    def _start_grammar(self, sampling: SamplingParams) -> GrammarState | None:
        return None if sampling.grammar is None else self.parts.grammars.start(sampling.grammar)

    def _check(self, prompt_ids: list[int], sampling: SamplingParams) -> None:
        vocab = self.parts.vocab_size
        if not all(0 <= token < vocab for token in prompt_ids):
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
        """One forward of the target: a prefill, or a round. Gives what its requests gained."""
        batch = self.scheduler.schedule()
        self._release_drafts()
        if batch is not None:
            if batch.forward_mode.is_prefill():
                self._prefill(batch)
            else:
                self.scheduler.commit_round(batch, self.round.run(batch))
                self.watch.check(self.scheduler.spec_totals)
            self._release_drafts()
        return self._collect()

    def stats(self) -> EngineStats:
        scheduler, graph = self.scheduler, self.parts.worker.runner.graph
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_slots=scheduler.num_slots,
            num_free_slots=scheduler.num_free_slots,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_cached_tokens=scheduler.num_cached_tokens,
            num_generated_tokens=scheduler.num_generated_tokens,
            num_retractions=scheduler.num_retractions,
            num_graph_forwards=graph.counters["replays"] if graph is not None else 0,
            num_eager_forwards=self.parts.worker.runner.num_eager,
            spec=scheduler.spec_totals,
        )

    def _prefill(self, batch: ScheduleBatch) -> None:
        output = self.parts.worker.forward_batch_generation(batch.get_model_worker_batch())
        result = self.parts.sample_prefill(output, masked_prefill(batch))
        self.drafter.seed(batch, output, result)
        self.scheduler.commit_prefill(batch, result)

    def _release_drafts(self) -> None:
        for req in self.scheduler.take_released():
            self.drafter.release(req)

    def _collect(self) -> list[RequestOutput]:
        choices = self.choices
        changed = [choices[req] for req in self.scheduler.take_changed() if req in choices]
        for choice in changed:
            if choice.req.is_finished:
                del choices[choice.req]
        return [choice.take_output() for choice in changed]


def choice_seed(seed: int, index: int) -> int:
    """A seed for each of the n choices of a request; the first is the request's own."""
    golden = 0x9E3779B97F4A7C15
    return (seed + index * golden) % (1 << 63) if index else seed
