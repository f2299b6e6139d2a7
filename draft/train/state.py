"""The state of a run: its counters, its output directory, its checkpoints and exports."""

from __future__ import annotations

import logging
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from specengine.core.errors import ConfigError
from specengine.draft.train.checkpoint import (
    Checkpoint,
    find_checkpoints,
    load_checkpoint,
    put_state,
    random_state,
    restore_random,
    save_checkpoint,
    take_state,
    writing_to,
)
from specengine.draft.train.config import TrainConfig, to_yaml
from specengine.draft.train.data.dataset import TokenDataset
from specengine.draft.train.data.packing import PackedBatches
from specengine.draft.train.processes import Processes
from specengine.draft.train.task import TrainTask

logger = logging.getLogger(__name__)


class RunState:
    """Made before the module is placed, begun once there are optimisers."""

    optimisers: list[Optimizer]
    batches: PackedBatches

    def __init__(
        self, task: TrainTask, dataset: TokenDataset, config: TrainConfig, processes: Processes
    ) -> None:
        if not config.run.output:
            raise ConfigError("run.output is not set; name a directory for the run")
        accumulate = config.optimiser.accumulate
        if accumulate % processes.count:
            raise ConfigError(
                f"optimiser.accumulate={accumulate} forwards a step cannot be shared equally by "
                f"{processes.count} processes; take a multiple"
            )
        self.task, self.config, self.processes = task, config, processes
        self.forwards = accumulate // processes.count  # a step, in this process
        self.directory = Path(config.run.output)
        self.identity = _identity(task, dataset, config)
        self.step = 0
        self.tokens = 0
        self.seconds_before = 0.0  # wall time of earlier sessions
        self.last_saved: Path | None = None

    def begin(self, optimisers: list[Optimizer], batches: PackedBatches) -> None:
        """Go on from the last checkpoint, or begin anew."""
        self.optimisers, self.batches = optimisers, batches
        found = find_checkpoints(self.directory / "checkpoints")
        if found and not self.config.run.resume:
            raise ConfigError(
                f"{self.directory} holds a run already (up to {found[-1].stem}); go on with it by "
                "run.resume=true, or choose another run.output"
            )
        if found:
            self._resume(found[-1])
        if self.processes.is_first:
            with writing_to(self.directory):
                self.directory.mkdir(parents=True, exist_ok=True)
                (self.directory / "config.yaml").write_text(to_yaml(self.config), "utf-8")
        self.processes.wait()

    def save(self, seconds: float) -> None:
        """A checkpoint of this step, unless there is one. Raises TrainingError."""
        if self.last_saved is not None and self.last_saved.stem == f"step-{self.step:08d}":
            return
        weights, states = take_state(self.task.module, self.optimisers)
        random = self.processes.gather(random_state(self.processes.device))
        directory = self.directory / "checkpoints"
        if self.processes.is_first:
            checkpoint = Checkpoint(
                step=self.step,
                tokens=self.tokens,
                seconds=seconds,
                identity=self.identity,
                module=weights,
                optimisers=states,
                data=dict(self.batches.state_dict()),
                random=random,
            )
            save_checkpoint(directory, checkpoint, self.config.run.keep)
        self.last_saved = directory / f"step-{self.step:08d}.pt"
        self.processes.wait()

    def export(self, name: str) -> Path:
        """What the engine can load, at the directory of this name; an earlier one there is replaced
        once the new one is whole. The same path in every process."""
        place = self.directory / name
        with self.processes.gathered(self.task.module):
            if self.processes.is_first:
                self._write_export(place)
            self.processes.wait()
        return place

    def _write_export(self, place: Path) -> None:
        part, old = (place.with_name(f".{place.name}.{kind}") for kind in ("part", "old"))
        with writing_to(place):
            for path in (part, old):
                shutil.rmtree(path, ignore_errors=True)
            part.mkdir(parents=True)
            self.task.export(part)
            if place.exists():
                place.rename(old)
            part.rename(place)
            shutil.rmtree(old, ignore_errors=True)

    def _resume(self, path: Path) -> None:
        checkpoint = load_checkpoint(path)
        _check_identity(checkpoint.identity, self.identity, path)
        put_state(self.task.module, self.optimisers, checkpoint.module, checkpoint.optimisers)
        self.batches.load_state_dict(checkpoint.data)  # type: ignore[arg-type]
        if len(checkpoint.random) != self.processes.count:
            logger.warning("another number of processes than before: randomness starts anew")
        else:
            restore_random(checkpoint.random[self.processes.rank], self.processes.device)
        self.step, self.tokens = checkpoint.step, checkpoint.tokens
        self.seconds_before, self.last_saved = checkpoint.seconds, path
        logger.info("going on from %s", path)


def _identity(task: TrainTask, dataset: TokenDataset, config: TrainConfig) -> dict[str, Any]:
    values = {f"task.{key}": value for key, value in asdict(config.task).items()}
    values |= {f"data.{name}": digest for name, digest in dataset.manifest.sha256.items()}
    values |= {"data.held_out": config.data.held_out, "optimiser.name": config.optimiser.name}
    return {"the task": task.name, **values}


def _check_identity(then: dict[str, Any], now: dict[str, Any], path: Path) -> None:
    for name in {**then, **now}:
        if then.get(name) != now.get(name):
            raise ConfigError(
                f"{path} cannot be resumed: {name} was {then.get(name)!r} and is "
                f"{now.get(name)!r}; give the same configuration and data, or another run.output"
            )
