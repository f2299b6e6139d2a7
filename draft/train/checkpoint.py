"""Checkpoints: everything that a run needs to go on as if it had never stopped.

One file a checkpoint, written beside its place and moved there once it is on the disk: whenever the
process is killed, the last one that has its name is whole.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from specengine.core.errors import TrainingError

_NAME = re.compile(r"step-(\d{8})\.pt")
_PART = ".part"
_FULL = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
_PART_OF_FULL = StateDictOptions(full_state_dict=True, ignore_frozen_params=True, strict=False)


@dataclass
class Checkpoint:
    step: int  # optimiser steps taken
    tokens: int  # learned from, over all processes
    seconds: float  # of wall time, over all sessions of the run
    identity: dict[str, Any]  # what must be the same to go on: task, data
    module: dict[str, Tensor]
    optimisers: list[dict[str, Any]]
    data: dict[str, Any]
    random: list[dict[str, Tensor]]  # a process


def save_checkpoint(directory: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Write it, and remove all but the newest `keep`. Raises TrainingError where it cannot be
    written; earlier ones are kept."""
    path = directory / f"step-{checkpoint.step:08d}.pt"
    part = path.with_name(path.name + _PART)
    with writing_to(path):
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                torch.save(asdict(checkpoint), file)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
            _sync_directory(directory)
        finally:
            part.unlink(missing_ok=True)
    for old in find_checkpoints(directory)[:-keep]:
        old.unlink()
    return path


def find_checkpoints(directory: Path) -> list[Path]:
    """The whole ones, oldest first."""
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if _NAME.fullmatch(path.name))


def load_checkpoint(path: Path) -> Checkpoint:
    """Tensors on the CPU. Raises TrainingError."""
    try:
        return Checkpoint(**torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # torch raises RuntimeError, EOFError, UnpicklingError and others
        raise TrainingError(
            f"the checkpoint {path} cannot be read ({error}); delete it to go on from the one "
            "before"
        ) from error


def take_state(
    module: nn.Module, optimisers: list[Optimizer]
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Whole tensors on the CPU (with several processes, of the first alone)."""
    weights: Any = get_model_state_dict(module, options=_FULL)
    states: list[Any] = [get_optimizer_state_dict(module, one, options=_FULL) for one in optimisers]
    return weights, states


def put_state(
    module: nn.Module,
    optimisers: list[Optimizer],
    weights: dict[str, Any],
    states: list[dict[str, Any]],
) -> None:
    """Whole tensors, in every process."""
    set_model_state_dict(module, weights, options=_PART_OF_FULL)
    for optimiser, state in zip(optimisers, states, strict=True):
        set_optimizer_state_dict(module, optimiser, state, options=_PART_OF_FULL)


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The state of this process's generators."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random(state: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


@contextmanager
def writing_to(path: Path) -> Iterator[None]:
    """Failures to write become a TrainingError that names the place."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise TrainingError(
            f"cannot write {path}: {error}. Free some disk space, then go on with run.resume=true; "
            "checkpoints written before are whole"
        ) from error


def _sync_directory(directory: Path) -> None:
    """A rename is on the disk once its directory is."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
