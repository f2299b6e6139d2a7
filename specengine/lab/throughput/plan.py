"""What a bench is asked to do, and the configuration of the engine that it does it with."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specengine.core.config import EngineConfig, SpecConfig
from specengine.core.errors import ConfigError
from specengine.engine.factories import check_algorithm, max_nodes
from specengine.engine.phases import Phases
from specengine.engine.resolve import resolve_device
from specengine.engine.spec_options import draft_slots, resolve_spec
from specengine.lab.accept.settings import Setting as SpecSetting
from specengine.lab.throughput.random_draft import ALGORITHM, random_eagle3
from specengine.lab.throughput.workload import Workload
from specengine.runner.loader.load import model_class_of
from specengine.runner.loader.loaded_model import LoadedModel
from specengine.runner.loader.source import resolve_model
from specengine.runner.memory.kept_state import state_shape_of
from specengine.target.registry import find_model_class

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


def prepare(plan: Plan, stack: ExitStack, phases: Phases | None = None) -> EngineConfig:
    """The configuration of the engine, with the draft that was asked for, room for the largest
    batch, and of memory no more than its part where two engines share it. phases: takes the part of
    a start-up in it: the first search for a model imports what reads it."""
    config, most = plan.config, max(plan.workload.batch_sizes)
    rows = config.schedule.max_running_requests
    if rows is not None and rows < most:
        raise ConfigError(f"--max-running-requests {rows}: a batch of {most} is to be measured")
    if rows is None:
        on_gpu = resolve_device(config.model.device).type == "cuda"
        schedule = replace(config.schedule, max_running_requests=max(most, 256 if on_gpu else 32))
        config = replace(config, schedule=schedule)
    if plan.random_draft is not None:
        config = replace(
            config, spec=_random_spec(config, plan.random_draft, stack, phases or Phases())
        )
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


def _random_spec(config: EngineConfig, vocab: int, stack: ExitStack, phases: Phases) -> SpecConfig:
    spec = config.spec
    if spec.algorithm is not None and check_algorithm(spec.algorithm) != ALGORITHM:
        raise ConfigError(f"--random-draft makes an {ALGORITHM} draft, not one of {spec.algorithm}")
    if spec.draft_model_path is not None:
        raise ConfigError("--random-draft or --speculative-draft-model-path: give one of them")
    with phases.phase("find model"):
        source = resolve_model(config.model)
        model_class_of(source, find_model_class)
    folder = stack.enter_context(random_eagle3(source.hf_config, vocab))
    return replace(spec, algorithm=ALGORITHM, draft_model_path=str(folder))


def share_states(plan: Plan, config: EngineConfig, loaded: LoadedModel) -> EngineConfig:
    """The configuration where two engines have recurrent state each: slots for the largest batch,
    unless more are asked for. A slot takes memory whether a request has it or not."""
    rows = plan.config.schedule.max_running_requests
    if not plan.compare_plain or rows is not None or state_shape_of(loaded.model) is None:
        return config
    schedule = replace(config.schedule, max_running_requests=max(plan.workload.batch_sizes))
    return replace(config, schedule=schedule)


def check_length(work: Workload, loaded: LoadedModel) -> None:
    context = loaded.config.model.context_length
    assert context is not None, "resolved"
    if work.longest > context:
        raise ConfigError(
            f"{work.prompt_len} + {work.new_tokens} tokens do not fit into a context of {context}: "
            "lower --prompt-len or --new-tokens"
        )


def shown_options(plan: Plan, spec: SpecConfig) -> dict[str, Any]:
    """Those that are not the defaults; the folder of a draft made for the run says nothing."""
    if spec.algorithm is None:
        return {}
    options = SpecSetting(spec.algorithm, spec).given
    if plan.random_draft is not None:
        options["draft_model_path"] = f"(random, {plan.random_draft} tokens)"
    return options
