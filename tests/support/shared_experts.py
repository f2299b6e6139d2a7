"""Engines that share experts, beside those that are alone, for tests on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.config import EngineConfig
from specengine.core.config_sources import config_from_flags
from specengine.core.sharing import ExpertSharers
from specengine.engine.build import build_engine, load
from specengine.engine.loop import Engine
from specengine.engine.phases import Phases
from specengine.engine.pipeline import RoundPipeline
from specengine.engine.sharing import share_rounds
from tests.support.device_rounds import make_eager_rounds, prepare_drafter
from tests.support.ranks import SMALL

NGRAM = SpecConfig(algorithm="NGRAM", adaptive=False, num_draft_tokens=4, ngram_min_match=1)
PROMPTS = [[5, 9, 7, 33, 2], [8, 8, 4, 8, 8], [100, 101, 100, 101, 100, 7, 3]]
PARAMS = [
    SamplingParams(max_tokens=9, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=6, temperature=0.8, seed=4, ignore_eos=True),
]


CHAIN: dict[str, Any] = {"num_steps": 3, "adaptive": False}
SPECS = {
    "eagle3": SpecConfig(algorithm="EAGLE3", **CHAIN),
    "tree": SpecConfig(algorithm="EAGLE3", eagle_topk=2, num_draft_tokens=6, **CHAIN),
    "mtp": SpecConfig(algorithm="MTP", **CHAIN),
}


def config_of(folder: Path, spec: SpecConfig | None, **more: Any) -> EngineConfig:
    flags = {**SMALL, "model": str(folder), "chunked_prefill_size": 4, **more}
    if spec is not None and spec.algorithm in ("EAGLE3", "MTP"):
        flags["load_format"] = "dummy"  # of the draft as well
    return config_from_flags(flags, spec)


def make(
    folder: Path, spec: SpecConfig | None, sharers: ExpertSharers | None, **flags: Any
) -> Engine:
    config = config_of(folder, spec, **flags)
    return build_engine(config, load(config, Phases(), None, sharers))


Plan = list[tuple[int, int]]  # number of a request, and the step in which it comes
Said = dict[int, list[int]]


def run_plan(engine: Engine, plan: Plan, num_steps: int = 30) -> Said:
    """All ranks step as often."""
    found: Said = {}
    for step in range(num_steps):
        for number, when in plan:
            if when == step:
                engine.add_request(str(number), PROMPTS[number % 3], PARAMS[number % 2])
        for output in engine.step():
            found[int(output.rid)] = output.token_ids
    assert not engine.has_work
    engine.scheduler.check_invariant()
    return found


def alone(folder: Path, spec: SpecConfig | None, **flags: Any) -> Said:
    config = config_of(folder, spec, **flags)
    engine = build_engine(config, load(config, Phases()))
    return run_plan(engine, [(number, 0) for number in range(6)], num_steps=60)


def run_on_device(engine: Engine, chooses: bool = False) -> None:
    """From now on; padded as in graphs, but nothing is captured."""
    llm, parts = LLM.of(engine), engine.parts
    prepare_drafter(llm)
    rounds = make_eager_rounds(llm, chooses=chooses)
    rounds.may_pause = False
    given = parts.drafter, parts.scheduler, None
    engine.pipeline = RoundPipeline(rounds, *given, overlaps=True, link=parts.link)
    share_rounds(parts.sharers, rounds)
