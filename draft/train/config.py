"""The configuration of a training run: a YAML file of sections, and `section.key=value` over it.

Sections are frozen dataclasses whose fields are core.options; the section `task` is of the class
that the task brings. Nothing rewrites a configuration while a run goes on.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from specengine.core.errors import ConfigError
from specengine.core.options import Option, option, options_of


@dataclass(frozen=True, kw_only=True)
class TrainSection:
    """A section; its fields are options. Checks their types when it is made."""

    section: ClassVar[str]

    def __post_init__(self) -> None:
        for name, one in options_of(type(self)).items():
            value = one.check(getattr(self, name), f"{self.section}.{name}")
            object.__setattr__(self, name, value)
        self._check_ranges()

    def _check_ranges(self) -> None:
        """Raise ConfigError where a value of the right type makes no sense."""

    def _at_least(self, low: float, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            self._require(value is None or value >= low, name, f"must be at least {low:g}")

    def _require(self, holds: bool, name: str, rule: str) -> None:
        if not holds:
            raise ConfigError(f"{self.section}.{name}={getattr(self, name)!r}: {rule}")


@dataclass(frozen=True, kw_only=True)
class DataConfig(TrainSection):
    section: ClassVar[str] = "data"

    path: str = option("", "directory of a data set, as `specengine data make` writes it")
    target: str | None = option(
        None, "the model to draft for; default: the one that the data set was made with"
    )
    held_out: float = option(0.02, "share of the documents that is evaluated on, not trained on")
    batch_tokens: int = option(8192, "tokens a forward, in whole documents")
    seed: int = option(0, "orders the documents and draws the held-out ones")

    def _check_ranges(self) -> None:
        self._require(0.0 < self.held_out < 1.0, "held_out", "must lie between 0 and 1")
        self._at_least(1, "batch_tokens")
        self._at_least(0, "seed")


@dataclass(frozen=True, kw_only=True)
class OptimiserConfig(TrainSection):
    section: ClassVar[str] = "optimiser"

    name: str = option(
        "adamw", "muon takes matrices and leaves the rest to adamw", ("adamw", "muon")
    )
    lr: float = option(3e-4, "peak learning rate")
    weight_decay: float = option(0.0, "of matrices; vectors have none")
    beta1: float = option(0.9, "adamw's decay of the gradient's mean; muon's momentum is 0.95")
    beta2: float = option(0.95, "adamw's decay of the gradient's square")
    max_grad_norm: float = option(1.0, "gradients are scaled down to this norm")
    accumulate: int = option(1, "forwards a step, over all processes together")

    def _check_ranges(self) -> None:
        self._require(self.lr > 0, "lr", "must be above 0, such as 3e-4")
        self._require(self.max_grad_norm > 0, "max_grad_norm", "must be above 0, such as 1.0")
        self._at_least(0, "weight_decay")
        self._at_least(1, "accumulate")
        for name in ("beta1", "beta2"):
            self._require(0 <= getattr(self, name) < 1, name, "must be at least 0 and below 1")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(TrainSection):
    section: ClassVar[str] = "schedule"

    max_steps: int = option(1000, "optimiser steps")
    warmup_steps: int = option(50, "steps in which the learning rate rises from 0")
    final_lr: float = option(0.05, "learning rate at the end, as a share of the peak")

    def _check_ranges(self) -> None:
        self._at_least(1, "max_steps")
        self._at_least(0, "warmup_steps")
        self._require(0.0 <= self.final_lr <= 1.0, "final_lr", "is a share of lr, from 0 to 1")


@dataclass(frozen=True, kw_only=True)
class RunConfig(TrainSection):
    section: ClassVar[str] = "run"

    output: str = option("", "directory of the run: checkpoints, log, export")
    resume: bool = option(False, "go on from the last checkpoint in the output directory")
    device: str = option("auto", "where to train", ("auto", "cpu", "cuda"))
    seed: int = option(0, "of initial weights and of whatever a task draws")
    max_minutes: float | None = option(
        None, "end after so much wall time at the latest, the learning rate's fall included"
    )
    log_every: int = option(10, "steps between lines of the log")
    eval_every: int = option(200, "steps between evaluations on held-out documents")
    eval_batches: int = option(8, "forwards an evaluation, at most")
    probe_every: int = option(
        0, "steps between measurements of the accepted length in an engine; 0: at the end alone"
    )
    probe_prompts: int = option(16, "held-out prompts of such a measurement")
    probe_tokens: int = option(128, "tokens of each answer in it, at temperature 0")
    probe_steps: int = option(5, "tokens drafted a round in it, as a chain")
    on_policy_rounds: int = option(
        0, "train on answers of an engine that takes the new weights, so many times; 0: on the data"
    )
    on_policy_prompts: int = option(256, "prompts of the data that it answers each time")
    on_policy_tokens: int = option(256, "tokens of each such answer, at most")
    on_policy_temperature: float = option(0.7, "of such answers")
    save_every: int = option(500, "steps between checkpoints; there is one at the end in any case")
    keep: int = option(2, "checkpoints to keep, the newest ones")

    def _check_ranges(self) -> None:
        self._require(
            self.max_minutes is None or self.max_minutes > 0, "max_minutes", "must be > 0"
        )
        self._at_least(0, "seed", "probe_every", "on_policy_rounds", "on_policy_temperature")
        self._at_least(1, "on_policy_prompts", "on_policy_tokens")
        self._at_least(1, "log_every", "eval_every", "eval_batches", "save_every", "keep")
        self._at_least(1, "probe_prompts", "probe_tokens", "probe_steps")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    task: TrainSection  # of the class that the task brings
    data: DataConfig
    optimiser: OptimiserConfig
    schedule: ScheduleConfig
    run: RunConfig


def load_config(
    task: type[TrainSection], file: Path | None, overrides: Sequence[str] = ()
) -> TrainConfig:
    """The configuration of a YAML `file`, with `section.key=value` overrides in their order.

    Raises ConfigError for what cannot be read, for unknown sections and keys (naming the nearest),
    and for values that do not fit.
    """
    classes = section_classes(task)
    values = _read_file(file, classes) if file is not None else {name: {} for name in classes}
    for text in overrides:
        name, key, value = _parse_override(text, classes)
        values[name][key] = value
    made: dict[str, Any] = {name: one(**values[name]) for name, one in classes.items()}
    return TrainConfig(**made)


def section_classes(task: type[TrainSection]) -> dict[str, type[TrainSection]]:
    """The sections of TrainConfig by name."""
    return {
        "task": task,
        "data": DataConfig,
        "optimiser": OptimiserConfig,
        "schedule": ScheduleConfig,
        "run": RunConfig,
    }


def to_yaml(config: TrainConfig) -> str:
    """The configuration as a YAML file that gives it back, each key with its help."""
    lines = []
    for section in fields(config):
        values = getattr(config, section.name)
        lines.append(f"{section.name}:")
        for name, one in options_of(type(values)).items():
            value = json.dumps(getattr(values, name))  # JSON is YAML
            lines.append(f"  {name}: {value}  # {one.help}")
    return "\n".join(lines) + "\n"


def _read_file(path: Path, classes: Mapping[str, type[TrainSection]]) -> dict[str, dict[str, Any]]:
    import yaml

    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} must hold sections: {', '.join(classes)}")
    values: dict[str, dict[str, Any]] = {name: {} for name in classes}
    for name, section in loaded.items():
        _check_known(f"{path}: section ", str(name), classes)
        if not isinstance(section, dict):
            raise ConfigError(f"{path}: {name} must hold one `key: value` a line")
        known = options_of(classes[name])
        for key, value in section.items():
            _check_known(f"{path}: key {name}.", str(key), known)
            values[name][key] = known[key].check(_number(value), f"{path}: {name}.{key}")
    return values


def _number(value: Any) -> Any:
    """YAML 1.1 reads 3e-4 as a text."""
    try:
        return float(value) if isinstance(value, str) and "e" in value else value
    except ValueError:
        return value


def _parse_override(text: str, classes: Mapping[str, type[TrainSection]]) -> tuple[str, str, Any]:
    path, equals, value = text.partition("=")
    name, dot, key = path.partition(".")
    if not equals or not dot:
        raise ConfigError(f"{text!r} is no override; write section.key=value, such as run.seed=1")
    _check_known("section ", name, classes)
    known: Mapping[str, Option] = options_of(classes[name])
    _check_known(f"key {name}.", key, known)
    return name, key, known[key].parse(value, path)


def _check_known(what: str, key: str, known: Mapping[str, Any]) -> None:
    if key in known:
        return
    near = difflib.get_close_matches(key, list(known), n=1, cutoff=0.0)
    raise ConfigError(f"{what}{key} is not known; did you mean {near[0]}?")
