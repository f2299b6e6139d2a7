"""Training runs, from a configuration to an export: what can be trained, and on what."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from specengine.core.config_sources import config_from_flags
from specengine.core.errors import ConfigError, ModelLoadError
from specengine.draft.train.config import TrainConfig, TrainSection
from specengine.draft.train.data.dataset import TokenDataset
from specengine.draft.train.data.fingerprint import tokenizer_sha256
from specengine.draft.train.dflash_task import DFlashConfig, make_dflash_task
from specengine.draft.train.eagle3_task import Eagle3Config, make_eagle3_task
from specengine.draft.train.loop import Outcome, Trainer
from specengine.draft.train.mtp_task import MtpConfig, make_mtp_task
from specengine.draft.train.processes import Processes, start_processes
from specengine.draft.train.standalone import StandaloneConfig, make_standalone_task
from specengine.draft.train.target import TargetConfig, make_target_task, prepare_text
from specengine.draft.train.task import TrainTask
from specengine.draft.train.teacher import Teacher
from specengine.engine.build import load
from specengine.engine.phases import Phases
from specengine.lab.on_policy import OnPolicyTrainer
from specengine.lab.probe import EngineProbe, probe_prompts
from specengine.runner.loader.loaded_model import LoadedModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DraftKind:
    """A drafter that learns from a target. algorithm: that of `--speculative-algorithm`."""

    config: type[TrainSection]
    make: Callable[[LoadedModel, TokenDataset, Any], TrainTask]
    algorithm: str


DRAFT_KINDS = {
    "eagle3": DraftKind(Eagle3Config, make_eagle3_task, "EAGLE3"),
    "dflash": DraftKind(DFlashConfig, make_dflash_task, "DFLASH"),
    "mtp": DraftKind(
        MtpConfig, lambda loaded, documents, config: make_mtp_task(loaded, config), "MTP"
    ),
    "standalone": DraftKind(
        StandaloneConfig,
        lambda loaded, documents, config: make_standalone_task(
            config, Teacher(loaded, cache_mb=config.feature_cache_mb)
        ),
        "STANDALONE",
    ),
}
TARGET = "target"


def config_class(kind: str) -> type[TrainSection]:
    """The class of the section `task`. Raises ConfigError for a kind that is not known."""
    if kind == TARGET:
        return TargetConfig
    if kind in DRAFT_KINDS:
        return DRAFT_KINDS[kind].config
    known = [*DRAFT_KINDS, TARGET]
    near = difflib.get_close_matches(kind, known, n=1)
    guess = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(f"cannot train {kind!r}; {guess}known are {', '.join(known)}")


def train(kind: str, config: TrainConfig) -> Outcome:
    """Run it to its end, or until a signal comes. Raises ConfigError, DataError, ModelLoadError or
    TrainingError."""
    processes = start_processes(config.run.device)
    try:
        torch.manual_seed(config.run.seed)  # the same initial weights in every process
        trainer = _target_trainer if kind == TARGET else _draft_trainer
        made = trainer(kind, config, processes)
        return made.run()
    finally:
        processes.close()


def _target_trainer(kind: str, config: TrainConfig, processes: Processes) -> Trainer:
    if config.run.on_policy_rounds:
        raise ConfigError("--on-policy is for drafters: a target has no engine to learn from")
    text = prepare_text(config, processes)
    return Trainer(make_target_task(config, text.tokenizer), text.dataset, config, processes)


def _draft_trainer(
    kind: str, config: TrainConfig, processes: Processes
) -> Trainer | OnPolicyTrainer:
    if not config.data.path:
        raise ConfigError(
            "no data: name data.path, a data set that the target made (`specengine data make`)"
        )
    dataset = TokenDataset(config.data.path)
    loaded = _load_target(config, dataset, processes)
    documents, held_out = dataset.split(config.data.held_out, config.data.seed)
    task = DRAFT_KINDS[kind].make(loaded, documents, config.task)
    probe = _probe(kind, config, loaded, held_out)
    if config.run.on_policy_rounds:
        return OnPolicyTrainer(task, documents, held_out, probe, config, processes)
    return Trainer(task, dataset, config, processes, probe)


def _load_target(config: TrainConfig, dataset: TokenDataset, processes: Processes) -> LoadedModel:
    """Raises DataError where the data set is in other tokens than the model's."""
    name = config.data.target or dataset.manifest.target.name
    flags = {"model": name, "device": processes.device.type}
    try:
        loaded = load(config_from_flags(flags), Phases())
    except ModelLoadError as error:
        if config.data.target is not None:
            raise
        raise ConfigError(
            f"the data set was made with a model called {name}, which is not found by that name "
            f"({error}); name it as data.target"
        ) from error
    dataset.check_target(tokenizer_sha256(loaded.tokenizer), loaded.model.vocab_size)
    return loaded


def _probe(
    kind: str, config: TrainConfig, loaded: LoadedModel, held_out: TokenDataset
) -> EngineProbe:
    run = config.run
    prompts = probe_prompts(held_out, run.probe_prompts, run.probe_tokens)
    return EngineProbe(loaded, DRAFT_KINDS[kind].algorithm, prompts, run.probe_steps)
