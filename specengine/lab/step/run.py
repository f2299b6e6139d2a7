"""Where the time of a round goes, at every batch size asked for."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from specengine.engine.build import build_engine, load
from specengine.engine.loop import Engine
from specengine.engine.phases import Phases
from specengine.engine.resolve import torch_dtype
from specengine.lab.accept.identity import target_identity
from specengine.lab.card import Card, measure_card
from specengine.lab.environment import environment
from specengine.lab.round_work import FORMULA, Work, round_work
from specengine.lab.step.measure import Batch, Counted, OnDevice, measure_eager, measure_on_device
from specengine.lab.step.report import Part, Report, Step
from specengine.lab.throughput.plan import Plan, check_length, prepare, shown_options

logger = logging.getLogger(__name__)

_MICRO = 1e-6


class StepBench:
    """On rounds that a graph holds it looks at the graph's kernels; on others, and on a CPU, at the
    host's clock around the same parts. Raises ConfigError, ModelLoadError or OutOfMemoryError where
    the engine cannot be built, and SpecEngineError where a profile tells nothing."""

    def __init__(self, plan: Plan, keep: Callable[[Report], object]) -> None:
        """keep: gets all that is there so far."""
        self.plan = plan
        self.keep = keep

    def run(self) -> Report:
        with ExitStack() as stack:
            config = prepare(self.plan, stack)
            config = replace(config, spec=replace(config.spec, adaptive=False))  # rounds alike
            loaded = load(config, Phases())
            check_length(self.plan.workload, loaded)
            engine = build_engine(config, loaded)
            engine.watch.mute()
            card = measure_card(
                loaded.device, torch_dtype(loaded.config.model.dtype), self.plan.copy
            )
            report = Report(
                date=datetime.date.today().isoformat(),
                environment=environment("specengine"),
                model=target_identity(loaded),
                options=shown_options(self.plan, engine.parts.config.spec),
                workload=self.plan.workload,
                card=card,
                limit=FORMULA,
                points=[],
            )
            for batch_size in self.plan.workload.batch_sizes:
                report.points.append(self._measure(engine, batch_size, card))
                seconds = report.points[-1].seconds
                logger.info("batch size %d: %.3f ms a round", batch_size, 1000 * seconds)
                self.keep(report)
            return report

    def _measure(self, engine: Engine, batch_size: int, card: Card) -> Step:
        workload = replace(self.plan.workload, batch_sizes=(batch_size,), repeats=2)
        context = workload.prompt_len + workload.new_tokens / 2
        batch, rounds = Batch(engine, workload, batch_size), engine.device_rounds
        before = replace(engine.scheduler.spec_totals)
        measured: OnDevice | Counted
        if rounds is not None and batch_size <= rounds.batch_sizes[-1]:
            measured = measure_on_device(batch, rounds, batch_size)
        else:
            measured = measure_eager(batch)
        totals = engine.scheduler.spec_totals
        drafts = totals.num_drafts - before.num_drafts
        drafted = (totals.num_draft_tokens - before.num_draft_tokens) / drafts if drafts else 0.0
        work = round_work(engine, batch_size, drafted, context)
        if isinstance(measured, OnDevice):
            return captured_step(measured, batch_size, drafted, context, work, card)
        return counted_step(measured, batch_size, drafted, context, work, card)


def captured_step(
    measured: OnDevice,
    batch_size: int,
    drafted: float,
    context: float,
    work: dict[str, Work],
    card: Card,
) -> Step:
    device = measured.device
    parts = [
        _part(
            name,
            _MICRO * sum(node.busy for node in nodes),
            work.get(name),
            card,
            idle=_MICRO * sum(node.idle for node in nodes),
            kernels=len(nodes),
        )
        for name, nodes in device.parts.items()
    ]
    return Step(
        batch_size=batch_size,
        is_captured=True,
        steps=drafted,
        context=context,
        rounds=device.rounds,
        seconds=_MICRO * device.period,
        parts=parts,
        between=_MICRO * device.between,
        host=measured.host | {"whole round": measured.seconds},
        calls=measured.calls,
        nodes=list(device.nodes),
    )


def counted_step(
    counted: Counted,
    batch_size: int,
    drafted: float,
    context: float,
    work: dict[str, Work],
    card: Card,
) -> Step:
    parts = [_part(name, seconds, work.get(name), card) for name, seconds in counted.parts.items()]
    return Step(
        batch_size=batch_size,
        is_captured=False,
        steps=drafted,
        context=context,
        rounds=counted.rounds,
        seconds=counted.seconds,
        parts=parts,
    )


def _part(
    name: str,
    seconds: float,
    work: Work | None,
    card: Card,
    idle: float = 0.0,
    kernels: int | None = None,
) -> Part:
    if work is None:
        return Part(name, seconds, idle, kernels)
    least = card.seconds(work.bytes, work.operations)
    return Part(name, seconds, idle, kernels, work.bytes, work.operations, least)
