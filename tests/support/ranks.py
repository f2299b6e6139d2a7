"""Engines on several ranks beside those of one, for tests on a CPU."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.config import EngineConfig
from specengine.core.config_sources import config_from_flags
from specengine.core.parallel import Link
from specengine.core.parallel_config import ParallelConfig
from specengine.engine.adaptive.cost_file import CostFile
from specengine.engine.adaptive.state import DepthChooser
from specengine.engine.build import build_engine, load
from specengine.engine.llm import Generation
from specengine.engine.loop import Engine
from specengine.engine.parallel.lead import LeadEngine
from specengine.engine.parallel.ranks import start_ranks
from specengine.engine.phases import Phases
from specengine.engine.pipeline import RoundPipeline
from specengine.engine.pipeline_build import make_pipeline
from specengine.runner.loader.loaded_model import LoadedModel
from tests.support.device_rounds import make_eager_rounds, prepare_drafter, run_on_device

SMALL = {
    "dtype": "float32",
    "device": "cpu",
    "max_total_tokens": 2048,
    "max_running_requests": 4,
    "mem_fraction_static": 0.6,  # of which what the tests before have left is taken off
}


class Group:
    """One model on `size` ranks, and on one. Engines of it are made in a tenth of a second."""

    def __init__(self, model: str, size: int, link: Link | None = None, **flags: Any) -> None:
        """link: to ranks that are there already, which let go of the model that they had."""
        self.flags = {"model": model, **SMALL, **flags}
        self.size = size
        self.ranks = self._load(size, link)
        self.one = self._load(1)

    def _load(self, size: int, link: Link | None = None) -> LoadedModel:
        config = config_from_flags({**self.flags, "tp_size": size})
        phases = Phases()
        return load(config, phases, link or start_ranks(config, phases))

    def pair(self, spec: SpecConfig | None, where: str = "host", **flags: Any) -> tuple[LLM, LLM]:
        """On one rank, and on several. where: rounds run on the "host", on the "device",
        or on the "device_by_turns", as deep as is chosen."""
        draft_tp_size = flags.pop("draft_tp_size", None)
        config = config_from_flags({**self.flags, **flags}, spec)
        parallel = ParallelConfig(tp_size=self.size, draft_tp_size=draft_tp_size)
        split: EngineConfig = replace(config, parallel=parallel)
        one, several = build_engine(config, self.one), build_engine(split, self.ranks)
        assert isinstance(several, LeadEngine)
        if where != "host":
            function = f"run_rounds_on_{where}"
            globals()[function](one)
            several.call(f"tests.support.ranks:{function}")
        return LLM.of(one), LLM.of(several)

    def end(self) -> None:
        self.ranks.link.watch.end()  # type: ignore[attr-defined]


def run_rounds_on_device(engine: Engine) -> None:
    run_on_device(LLM.of(engine))


def run_rounds_on_device_by_turns(engine: Engine) -> None:
    """As deep as DepthChooser chooses, by times that rank 0 alone has measured."""
    llm, parts = LLM.of(engine), engine.parts
    prepare_drafter(llm)
    rounds = make_eager_rounds(llm, chooses=True)
    steps = DepthChooser(rounds.steps)
    given = parts.drafter, parts.scheduler, steps
    engine.pipeline = RoundPipeline(rounds, *given, overlaps=True, link=parts.link)


def run_rounds_by_measured_costs(engine: Engine, path: str) -> None:
    """As deep as a table says, which rank 0 reads, or all measure, as at a start on a GPU."""
    llm, parts = LLM.of(engine), engine.parts
    prepare_drafter(llm)
    rounds = make_eager_rounds(llm, sizes=(1, 2, 4), chooses=True)
    spec = replace(parts.config.spec, cost_table=path)
    costs = CostFile.of(spec) if parts.link.communicator.rank == 0 else None
    engine.pipeline = make_pipeline(parts.config, parts, rounds, costs)


def be_late_at_random(engine: Engine, rank: int) -> None:
    """From now on one rank sleeps for up to 2 ms before one of eight collectives, messages and
    decisions."""
    link: Any = engine.parts.link
    if link.communicator.rank != rank:
        return
    draws = random.Random(rank)

    def late(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*given: Any) -> Any:
            if draws.random() < 1 / 8:
                time.sleep(draws.random() * 2e-3)
            return call(*given)

        return called

    for name in ("all_reduce", "all_gather", "greatest"):
        setattr(link.communicator, name, late(getattr(link.communicator, name)))
    for name in ("next", "tell", "decide"):
        if hasattr(link, name):
            setattr(link, name, late(getattr(link, name)))


def be_on_time(engine: Engine) -> None:
    """What be_late_at_random has changed is as it was."""
    link: Any = engine.parts.link
    for owner in (link.communicator, link):
        for name in ("all_reduce", "all_gather", "greatest", "next", "tell", "decide"):
            vars(owner).pop(name, None)


def told(found: list[Generation]) -> list[Any]:
    """Tokens, ends, and what was drafted and accepted."""
    return [
        (one.token_ids, one.finish_reason, one.spec.num_draft_tokens, one.spec.num_accepted)
        for generation in found
        for one in generation.completions
    ]


def same_on_all(
    pair: tuple[LLM, LLM], prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
) -> list[Any]:
    """What both give."""
    one, several = (told(llm.generate(prompts, params)) for llm in pair)
    assert several == one
    for llm in pair:
        llm.engine.scheduler.check_invariant()
    return one
