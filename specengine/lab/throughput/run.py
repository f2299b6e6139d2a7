"""Batches of every size through an engine, and through one that decodes plainly beside it."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, replace
from time import perf_counter

from specengine.core.config import EngineConfig, SpecConfig
from specengine.core.errors import SpecEngineError
from specengine.core.version import __version__
from specengine.engine.build import build_engine, load
from specengine.engine.factories import check_algorithm
from specengine.engine.garbage import frozen_objects
from specengine.engine.loop import Engine
from specengine.engine.parallel.ranks import start_ranks
from specengine.engine.phases import Phases
from specengine.engine.resolve import torch_dtype
from specengine.lab.accept.identity import target_identity
from specengine.lab.accept.speed import Timing, run_batches
from specengine.lab.card import Card, measure_card
from specengine.lab.environment import environment, process_seconds
from specengine.lab.round_work import FORMULA, least_seconds, round_work
from specengine.lab.throughput.peers import Asked, find_peers
from specengine.lab.throughput.plan import Plan, check_length, prepare, share_states, shown_options
from specengine.lab.throughput.report import PLAIN, Point, Report, Setting, Startup
from specengine.lab.throughput.workload import Workload
from specengine.runner.loader.loaded_model import LoadedModel

logger = logging.getLogger(__name__)

Keep = Callable[[Report], object]  # told of all that is there so far


class ThroughputBench:
    """Raises ConfigError, ModelLoadError or OutOfMemoryError where an engine cannot be built, and
    SpecEngineError where a batch does not come through whole.

    turn: entered when the weights are loaded, before the engines take memory; left when all is
    measured. Entering it may wait for other programs that use the device."""

    def __init__(
        self, plan: Plan, keep: Keep, turn: AbstractContextManager[None] | None = None
    ) -> None:
        self.plan = plan
        self.keep = keep
        self.turn = nullcontext() if turn is None else turn

    def run(self) -> Report:
        with ExitStack() as stack:
            phases, begun = Phases(), process_seconds()
            config = prepare(self.plan, stack, phases)
            begun = None if begun is None else begun + phases.total
            return self._run(config, phases, begun)

    def _run(self, config: EngineConfig, phases: Phases, begun: float | None) -> Report:
        """begun: seconds of the process so far, but for those that making a draft took."""
        start = perf_counter()
        loaded = load(config, phases, start_ranks(config, phases))
        check_length(self.plan.workload, loaded)
        config = share_states(self.plan, config, loaded)
        begun = None if begun is None else begun + perf_counter() - start
        with self.turn:
            return self._measured(config, loaded, phases, begun)

    def _measured(
        self, config: EngineConfig, loaded: LoadedModel, phases: Phases, begun: float | None
    ) -> Report:
        """begun: seconds of the process until the weights were loaded."""
        start = perf_counter()
        engines = {_name(config.spec): build_engine(config, loaded, phases)}
        whole = None if begun is None else begun + perf_counter() - start
        startups = [Startup(phases.total, phases.seconds, whole)]
        if self.plan.compare_plain:
            again = Phases()
            engines[PLAIN] = build_engine(replace(config, spec=SpecConfig()), loaded, again)
            startups.append(Startup(again.total, again.seconds))
        report = self._report(config, loaded, engines, startups)
        with frozen_objects():
            self._sweep(report, engines, loaded.model.vocab_size)
        return report

    def _sweep(self, report: Report, engines: dict[str, Engine], vocab_size: int) -> None:
        work = self.plan.workload
        for batch_size in work.batch_sizes:
            timings = _measure(list(engines.values()), work, batch_size, vocab_size)
            for setting, engine, found in zip(
                report.settings, engines.values(), timings, strict=True
            ):
                setting.points.append(_point(engine, work, batch_size, found, report.card))
                setting.is_lossy |= any(one.spec.is_lossy for one in found)
                setting.graphs = {k: asdict(v) for k, v in engine.stats().graphs.items()}
                logger.info("%s: %s", setting.name, _line(setting.points[-1]))
            self.keep(report)

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
            settings.append(Setting(name, shown_options(self.plan, spec), startup, peers))
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


def _name(spec: SpecConfig) -> str:
    return PLAIN if spec.algorithm is None else spec.algorithm


def _measure(
    engines: list[Engine], work: Workload, batch_size: int, vocab_size: int
) -> list[list[Timing]]:
    """Timings of each engine, in turns, without the first run, which warms up."""
    found: list[list[Timing]] = [[] for _ in engines]
    for number, prompts in enumerate(work.batches(batch_size, vocab_size)):
        for place in _order(len(engines), number):
            timing = run_batches(engines[place], prompts, work.params, batch_size, _ignore)
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
    """Answers are not awaited one by one."""


def _point(
    engine: Engine, work: Workload, batch_size: int, timings: list[Timing], card: Card | None
) -> Point:
    best = min(timings, key=lambda one: one.seconds)
    rounds = best.spec.num_rounds
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
