"""Every setting at every temperature on the same prompts, results kept as they come."""

from __future__ import annotations

import datetime
import gc
import logging
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from specengine.core.config import EngineConfig, SpecConfig
from specengine.core.errors import SpecEngineError
from specengine.core.trace_config import TraceConfig
from specengine.engine.build import build_engine, load
from specengine.engine.factories import max_nodes
from specengine.engine.loop import Engine
from specengine.engine.phases import Phases
from specengine.engine.spec_options import draft_slots, resolve_spec
from specengine.lab.accept.bootstrap import draw_prompts
from specengine.lab.accept.compare import Kept, differences, run_result
from specengine.lab.accept.identity import data_identity, draft_identity, target_identity
from specengine.lab.accept.measure import Run, Sampling, draft_vocabulary, measure
from specengine.lab.accept.prompts import PromptSet
from specengine.lab.accept.report import Report, SettingResult
from specengine.lab.accept.script import Script
from specengine.lab.accept.settings import Setting
from specengine.lab.accept.speed import Speed, SpeedPlan, measure_speed
from specengine.lab.accept.statistics import Sample
from specengine.lab.accept.summary import summarise
from specengine.lab.environment import environment

logger = logging.getLogger(__name__)

NUM_DRAWS = 2000
_SPEED_PROMPTS = 8  # at least, in whole batches


@dataclass(frozen=True)
class Plan:
    """config: of all engines but for `spec`."""

    config: EngineConfig
    settings: tuple[Setting, ...]
    sets: tuple[PromptSet, ...]
    temperatures: tuple[float, ...] = (0.0,)
    max_new_tokens: int = 256
    batch_size: int = 8
    seed: int = 0
    speed: SpeedPlan | None = None


class Watcher(Protocol):
    def starts(self, name: str, num_answers: int) -> None: ...

    def answered(self, num_tokens: int) -> None: ...

    def has_come(self, report: Report) -> None:
        """With all that is there so far."""


class AcceptBench:
    """Loads the target, and lends it to an engine a setting. Raises ConfigError or ModelLoadError
    where the target cannot be had; a setting that fails is named in the report instead.

    Of each temperature, the first lossless run writes the answers that are between the questions
    of a conversation, and all later runs read these: they go through the same texts. Greedy answers
    are the same anyway; sampled ones agree seed by seed where drafts are matched, and are other
    draws of the same distribution where a rule weighs sampled drafts. Prompts pair all of them.
    """

    def __init__(self, plan: Plan, watcher: Watcher) -> None:
        self.plan = plan
        self.watcher = watcher
        self.config = _shared_config(plan)
        self.loaded = load(self.config, Phases())
        self.script = Script(plan.sets, self.loaded.tokenizer)
        self.labels = self.script.labels()
        self.drawings = draw_prompts(self.labels.set_of, NUM_DRAWS, plan.seed)
        self.results: list[SettingResult] = []
        self.kept: list[Kept] = []
        self.plain: Engine | None = None
        self.facts = (environment("specengine"), target_identity(self.loaded))

    def run(self) -> Report:
        for setting in self.plan.settings:
            result = SettingResult(setting.name, setting.given)
            self.results.append(result)
            try:
                self._measure(setting, result)
            except SpecEngineError as error:
                result.error = str(error)
                logger.warning("%s: %s", setting.name, error)
            except Exception as error:  # one broken drafter must not cost the others' results
                result.error = f"{type(error).__name__}: {error}"
                logger.exception("%s failed", setting.name)
            _free_memory()
            self.watcher.has_come(self.report())
        return self.report()

    def report(self) -> Report:
        plan = self.plan
        return Report(
            date=datetime.date.today().isoformat(),
            environment=self.facts[0],
            target=self.facts[1],
            data=[data_identity(one) for one in plan.sets],
            protocol={
                "temperatures": list(plan.temperatures),
                "max_new_tokens": plan.max_new_tokens,
                "batch_size": plan.batch_size,
                "seed": plan.seed,
                "chat_template": self.script.is_chat,
                "bootstrap_samples": NUM_DRAWS,
                "confidence_level": 0.95,
            },
            settings=self.results,
            differences=differences(self.kept, self.labels.set_names, self.labels.set_of),
        )

    def _measure(self, setting: Setting, result: SettingResult) -> None:
        engine = self._engine(setting.spec)
        result.draft = draft_identity(setting.spec, self.config.model)
        known = draft_vocabulary(engine.drafter, engine.parts.vocab_size)
        result.draft_vocabulary = None if known is None else int(known.sum())
        for temperature in self.plan.temperatures:
            run = self._run(engine, setting.name, temperature)
            sample = Sample(run.table, run.prompts[run.table.request], self.drawings)
            first = self._first(temperature)
            kept = Kept(setting.name, temperature, run, sample)
            self.kept.append(kept)
            result.is_lossy |= run.is_lossy
            turns = run.turns[run.table.request]
            summary = summarise(sample, turns, self.labels, known)
            result.runs.append(run_result(kept, first or kept, summary))
            self.watcher.has_come(self.report())
        if self.plan.speed is not None:
            result.speed = self._speed(engine, self.plan.speed)

    def _run(self, engine: Engine, name: str, temperature: float) -> Run:
        first = self._first(temperature)
        sampling = Sampling(temperature, self.plan.max_new_tokens, self.plan.seed)
        num_answers = sum(len(prompt.turns) for prompt in self.script.prompts)
        self.watcher.starts(f"{name}, temperature {temperature:g}", num_answers)
        replies = None if first is None else first.run.replies
        return measure(engine, self.script, sampling, replies, self.watcher.answered)

    def _first(self, temperature: float) -> Kept | None:
        """The run whose answers are in all conversations."""
        runs = (kept for kept in self.kept if kept.temperature == temperature)
        return next((kept for kept in runs if not kept.run.is_lossy), None)

    def _speed(self, engine: Engine, plan: SpeedPlan) -> Speed:
        self.plain = self.plain or self._engine(SpecConfig())
        count = -(-_SPEED_PROMPTS // plan.batch_size) * plan.batch_size
        turns = self.script.turns(0, {})
        chosen = [turns[place * len(turns) // count] for place in range(count)]
        params = Sampling(
            self.plan.temperatures[0], self.plan.max_new_tokens, self.plan.seed
        ).params(turns[0])
        prompts = [turn.token_ids for turn in chosen]
        num_runs = 2 * (plan.repeats + 1)
        self.watcher.starts("speed beside plain decoding", num_runs * count)
        return measure_speed(engine, self.plain, prompts, params, plan, self.watcher.answered)

    def _engine(self, spec: SpecConfig) -> Engine:
        """Settings are measured as they are given: at a fixed depth."""
        config = replace(self.config, spec=replace(spec, adaptive=False))
        if config.memory.max_total_tokens is None:
            tokens = self.plan.batch_size * self._longest(resolve_spec(spec))
            config = replace(config, memory=replace(config.memory, max_total_tokens=tokens))
        return build_engine(config, self.loaded)

    def _longest(self, spec: SpecConfig) -> int:
        """KV slots that a request can come to take: several engines share the memory."""
        context = self.loaded.config.model.context_length
        assert context is not None, "resolved"
        longest = self.script.longest(self.plan.max_new_tokens)
        # The round that follows one in flight takes as many nodes again.
        return min(context, longest) + 2 * max_nodes(spec) + draft_slots(spec)


def _shared_config(plan: Plan) -> EngineConfig:
    """Without a prefix cache, which would make drafts depend on what was asked before; rounds by
    themselves, so that each is seen; and no graphs where nothing is timed, for rounds that are
    recorded run without."""
    config = plan.config
    return replace(
        config,
        spec=SpecConfig(),
        trace=TraceConfig(),
        memory=replace(config.memory, disable_radix_cache=True),
        graph=config.graph if plan.speed else replace(config.graph, disable_cuda_graph=True),
        schedule=replace(
            config.schedule,
            max_running_requests=plan.batch_size,
            max_queued_requests=max(1, sum(len(one.prompts) for one in plan.sets)),
            enable_mixed_chunk=False,
        ),
    )


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
