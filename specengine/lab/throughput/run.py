"""Batches of every size through an engine, and through one that decodes plainly beside it."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from specengine import __version__
from specengine.core.config import EngineConfig, SpecConfig
from specengine.core.errors import ConfigError, SpecEngineError
from specengine.core.sampling import SamplingParams
from specengine.engine.build import build_engine, load
from specengine.engine.loop import Engine
from specengine.engine.phases import Phases
from specengine.engine.registry import check_algorithm, max_nodes
from specengine.engine.resolve import resolve_device, torch_dtype
from specengine.engine.spec_options import draft_slots, resolve_spec
from specengine.lab.accept.identity import target_identity
from specengine.lab.accept.settings import Setting as SpecSetting
from specengine.lab.accept.speed import Timing, run_batches
from specengine.lab.card import Card, measure_card
from specengine.lab.environment import environment, process_seconds
from specengine.lab.round_work import FORMULA, least_seconds, round_work
from specengine.lab.throughput.peers import Asked, find_peers
from specengine.lab.throughput.random_draft import random_eagle3
from specengine.lab.throughput.report import PLAIN, Point, Report, Setting, Startup
from specengine.lab.throughput.workload import Workload
from specengine.runner.loader.loaded_model import LoadedModel
from specengine.runner.loader.source import resolve_model

logger = logging.getLogger(__name__)

Keep = Callable[[Report], object]  # told of all that is there so far
_BATCHES_KEPT = 4  # of the largest size: KV memory of two engines that share a card


@dataclass(frozen=True)
class Plan:
    """random_draft: vocabulary of an EAGLE-3 draft to be made. compare_plain: beside the engine
    asked for, one without speculation, in turns. copy: bytes a second, instead of measuring."""

    config: EngineConfig
    workload: Workload
    random_draft: int | None = None
    compare_plain: bool = False
    copy: float | None = None
    peers: Path | None = None


class ThroughputBench:
    """Raises ConfigError, ModelLoadError or OutOfMemoryError where an engine cannot be built, and
    SpecEngineError where a batch does not come through whole."""

    def __init__(self, plan: Plan, keep: Keep) -> None:
        self.plan = plan
        self.keep = keep

    def run(self) -> Report:
        with ExitStack() as stack:
            config = _prepare(self.plan, stack)
            return self._run(config)

    def _run(self, config: EngineConfig) -> Report:
        work, phases = self.plan.workload, Phases()
        loaded = load(config, phases)
        _check_length(work, loaded)
        engines = {_name(config.spec): build_engine(config, loaded, phases)}
        startups = [Startup(phases.total, phases.seconds, process_seconds())]
        if self.plan.compare_plain:
            again = Phases()
            engines[PLAIN] = build_engine(replace(config, spec=SpecConfig()), loaded, again)
            startups.append(Startup(again.total, again.seconds))
        report = self._report(config, loaded, engines, startups)
        for batch_size in work.batch_sizes:
            timings = _measure(list(engines.values()), work, batch_size, loaded.model.vocab_size)
            for setting, engine, found in zip(
                report.settings, engines.values(), timings, strict=True
            ):
                setting.points.append(_point(engine, work, batch_size, found, report.card))
                setting.is_lossy |= any(one.spec.is_lossy for one in found)
                setting.graphs = {k: asdict(v) for k, v in engine.stats().graphs.items()}
                logger.info("%s: %s", setting.name, _line(setting.points[-1]))
            self.keep(report)
        return report

    def _report(
        self,
        config: EngineConfig,
        loaded: LoadedModel,
        engines: dict[str, Engine],
        startups: list[Startup],
    ) -> Report:
        facts = environment("specengine")
        card = measure_card(
            loaded.device, torch_dtype(loaded.config.model.dtype), copy=self.plan.copy
        )
        settings = []
        for (name, engine), startup in zip(engines.items(), startups, strict=True):
            spec = engine.parts.config.spec
            algorithm = None if spec.algorithm is None else check_algorithm(spec.algorithm)
            forced = spec.simulate_accept_length
            gpu = facts["gpu"] if loaded.device.type == "cuda" else None
            asked = Asked(loaded.source.name, algorithm, forced, gpu, self.plan.workload)
            peers = find_peers(asked, self.plan.peers)
            settings.append(Setting(name, self._options(name, spec), startup, peers))
        return Report(
            date=datetime.date.today().isoformat(),
            environment=facts,
            engine=f"specengine {__version__}",
            model=target_identity(loaded),
            workload=self.plan.workload,
            settings=settings,
            card=card,
            limit=FORMULA,
        )

    def _options(self, name: str, spec: SpecConfig) -> dict[str, Any]:
        if spec.algorithm is None:
            return {}
        options = SpecSetting(name, spec).given
        if self.plan.random_draft is not None:
            options["draft_model_path"] = f"(random, {self.plan.random_draft} tokens)"
        return options


def _prepare(plan: Plan, stack: ExitStack) -> EngineConfig:
    """The configuration of the engine, with the draft that was asked for, room for the largest
    batch, and of memory no more than its part where two engines share it."""
    config, most = plan.config, max(plan.workload.batch_sizes)
    rows = config.schedule.max_running_requests
    if rows is not None and rows < most:
        raise ConfigError(f"--max-running-requests {rows}: a batch of {most} is to be measured")
    if rows is None:
        on_gpu = resolve_device(config.model.device).type == "cuda"
        schedule = replace(config.schedule, max_running_requests=max(most, 256 if on_gpu else 32))
        config = replace(config, schedule=schedule)
    if plan.random_draft is not None:
        config = replace(config, spec=_random_spec(config, plan.random_draft, stack))
    if plan.compare_plain and config.spec.algorithm is None:
        raise ConfigError(
            "--compare-plain: nothing to compare; name --speculative-algorithm or --random-draft"
        )
    if plan.compare_plain and config.memory.max_total_tokens is None:
        spec = resolve_spec(config.spec)
        longest = plan.workload.longest + 2 * max_nodes(spec) + draft_slots(spec)
        tokens = -(-_BATCHES_KEPT * most * longest // 64) * 64
        config = replace(config, memory=replace(config.memory, max_total_tokens=tokens))
    return config


def _random_spec(config: EngineConfig, vocab: int, stack: ExitStack) -> SpecConfig:
    spec = config.spec
    if spec.algorithm is not None and check_algorithm(spec.algorithm) != "EAGLE3":
        raise ConfigError(f"--random-draft makes an EAGLE3 draft, not one of {spec.algorithm}")
    if spec.draft_model_path is not None:
        raise ConfigError("--random-draft or --speculative-draft-model-path: give one of them")
    target = resolve_model(config.model).hf_config
    folder = stack.enter_context(random_eagle3(target, vocab))
    return replace(spec, algorithm="EAGLE3", draft_model_path=str(folder))


def _name(spec: SpecConfig) -> str:
    return PLAIN if spec.algorithm is None else spec.algorithm


def _check_length(work: Workload, loaded: LoadedModel) -> None:
    context = loaded.config.model.context_length
    assert context is not None, "resolved"
    if work.longest > context:
        raise ConfigError(
            f"{work.prompt_len} + {work.new_tokens} tokens do not fit into a context of {context}: "
            "lower --prompt-len or --new-tokens"
        )


def _measure(
    engines: list[Engine], work: Workload, batch_size: int, vocab_size: int
) -> list[list[Timing]]:
    """Timings of each engine, in turns, without the first run, which warms up."""
    params = SamplingParams(max_tokens=work.new_tokens, temperature=0.0, ignore_eos=True)
    found: list[list[Timing]] = [[] for _ in engines]
    for number, prompts in enumerate(work.batches(batch_size, vocab_size)):
        for place in _order(len(engines), number):
            timing = run_batches(engines[place], prompts, params, batch_size, _ignore)
            if timing.tokens != batch_size * work.new_tokens:
                raise SpecEngineError(
                    f"a batch of {batch_size} gave {timing.tokens} tokens of "
                    f"{batch_size * work.new_tokens}; is --max-total-tokens large enough?"
                )
            if number:
                found[place].append(timing)
    return found


def _order(count: int, number: int) -> Iterator[int]:
    """Now this one first, now that one."""
    return iter(range(count)) if number % 2 else reversed(range(count))


def _ignore(num_tokens: int) -> None:
    """Nobody waits for single answers."""


def _point(
    engine: Engine, work: Workload, batch_size: int, timings: list[Timing], card: Card | None
) -> Point:
    best = min(timings, key=lambda one: one.seconds)
    rounds = best.spec.num_steps
    tau = best.spec.mean_acceptance_length
    drafted = best.spec.num_draft_tokens / rounds
    limit = None
    if card is not None:
        context = work.prompt_len + work.new_tokens / 2
        parts = round_work(engine, batch_size, drafted, context)
        limit = batch_size * tau / least_seconds(parts, card)
    rates = tuple(one.tokens / one.seconds for one in timings)
    return Point(batch_size, rates, tau, rounds / batch_size, drafted, limit)


def _line(point: Point) -> str:
    return f"batch size {point.batch_size}, {point.rate:.0f} tok/s, τ {point.tau:.2f}"
