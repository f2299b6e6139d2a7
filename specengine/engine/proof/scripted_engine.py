"""An engine without a model, which emits tokens at a given pace: the code around an engine is
measured and tested with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic, perf_counter, sleep
from types import SimpleNamespace
from typing import Any

from specengine.core.config import EngineConfig
from specengine.core.request import FinishReason, Req
from specengine.core.sampling import SamplingParams
from specengine.core.spec_stats import DepthChoice
from specengine.engine.outgoing import Choice
from specengine.engine.outputs import EngineStats


@dataclass(frozen=True)
class Pace:
    """Seconds of a step: `step` and `request` for each request that runs, in which each gets
    `tokens` tokens. spins: the processor is busy meanwhile, as that of a GPU's host is."""

    step: float = 0.0
    request: float = 0.0
    tokens: int = 1
    spins: bool = False

    def pass_time(self, num_requests: int, start: float) -> None:
        end = start + self.step + self.request * num_requests
        if not self.spins:
            sleep(max(end - perf_counter(), 0.0))
        while perf_counter() < end:
            pass


@dataclass(eq=False)
class ScriptedEngine:
    """What EngineHost and EngineProcess use of Engine. Requests end by max_tokens alone; token k of
    an answer is (first prompt token + k) modulo `vocab_size`."""

    tokenizer: Any
    vocab_size: int
    pace: Pace
    config: EngineConfig
    context_length: int = 1_000_000
    choices: dict[Req, Choice] = field(default_factory=dict)
    before_step: Callable[[], object] = lambda: None
    keeps_turning: bool = False
    num_aborts: int = 0
    num_generated: int = 0

    @property
    def parts(self) -> Any:
        return SimpleNamespace(
            tokenizer=self.tokenizer,
            model_name="scripted",
            context_length=self.context_length,
            vocab_size=self.vocab_size,
            config=self.config,
            grammars=None,
            pooling=None,
            sampling_defaults={},
        )

    @property
    def has_work(self) -> bool:
        return bool(self.choices)

    def check(self) -> None:
        """Whatever it depends on runs: there is nothing."""

    def call_if_stopped(self, tell: Callable[[], object]) -> None:
        """Nothing that it depends on can stop."""

    def add_request(
        self, rid: str, prompt_ids: list[int], sampling: SamplingParams, stream: bool, grammar: Any
    ) -> None:
        for index in range(sampling.n):
            req = Req(f"{rid}#{index}", prompt_ids, sampling)
            req.admitted_time = req.arrival_time
            self.choices[req] = Choice(req, rid, index, self.tokenizer, stream)

    def abort(self, rid: str) -> None:
        for choice in [one for one in self.choices.values() if one.rid == rid]:
            del self.choices[choice.req]
            self.num_aborts += 1

    def advance(self) -> list[Choice]:
        start = perf_counter()
        self.before_step()
        now, ended = monotonic(), []
        for req in self.choices:
            made, limit = len(req.output_ids), req.sampling.max_tokens or 128
            first = req.prompt_ids[0] + made
            count = min(self.pace.tokens, limit - made)
            req.output_ids += [(first + k) % self.vocab_size for k in range(count)]
            self.num_generated += count
            req.spec.record(0, 0, NO_DEPTH)
            req.first_token_time = req.first_token_time or now
            if made + count == limit:
                req.finish_reason, req.finish_time = FinishReason("length"), now
                ended.append(req)
        changed = [one for one in self.choices.values() if one.streams or one.req.finish_reason]
        for req in ended:
            del self.choices[req]
        self.pace.pass_time(len(self.choices), start)
        return changed

    def take_changed(self) -> list[Choice]:
        """`advance` gives all."""
        return []

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self.choices),
            num_generated_tokens=self.num_generated,
            num_aborts=self.num_aborts,
            model_name="scripted",
            algorithm="none",
        )

    def use_idle_moment(self, may_capture: bool = True, is_wanted: Any = None) -> bool:
        return False

    def close(self) -> None:
        pass


NO_DEPTH = DepthChoice(0, "scripted", None)
