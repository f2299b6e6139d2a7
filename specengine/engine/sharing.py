"""Engines with requests of their own that share experts (--enable-dp-attention)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from zlib import crc32

import torch
from torch import nn

from specengine.core.batch import ModelWorkerBatch
from specengine.core.config import EngineConfig
from specengine.core.errors import ConfigError, EngineStoppedError
from specengine.core.sharing import ExpertSharers
from specengine.engine.round.executor import RoundExecutor
from specengine.engine.round.shared import AgreedRounds
from specengine.layers.sparse_mlp import SparseMLP
from specengine.runner.communicators.lost import RanksLostError
from specengine.runner.model_runner import ModelRunner

_PAUSE = 1e-3  # seconds between steps in which no rank had anything to do


@dataclass(frozen=True)
class Meeting:
    """Where the engines of --enable-dp-attention find each other. folder: of this run alone.
    engine: number of the one that comes."""

    folder: str
    engine: int
    num_engines: int


def meet(
    place: Meeting, device: torch.device, symmetric: bool, rank: int = 0, ranks: int = 1
) -> ExpertSharers:
    """The other engines that share experts. symmetric: --enable-symm-mem. rank, ranks: within the
    engine (--tp-size). Waits for all ranks of all of them."""
    from torch._C._distributed_c10d import FileStore, PrefixStore

    from specengine.runner.communicators.connect import connect

    engines = place.num_engines
    store = FileStore(f"{place.folder}/store", engines * ranks)
    if ranks == 1:
        return ExpertSharers(connect(store, place.engine, engines, device, symmetric))
    beside = PrefixStore(f"rank {rank}", store)
    all_ranks, number = PrefixStore("experts", store), place.engine * ranks + rank
    return ExpertSharers(
        connect(beside, place.engine, engines, device, symm_mem=False),  # which adds nothing up
        connect(all_ranks, number, engines * ranks, device, symmetric),
    )


def shared_step(
    sharers: ExpertSharers | None, step: Callable[[], object], has_work: Callable[[], bool]
) -> None:
    """Runs a step of an engine. All that share experts step together: one that has no work steps
    too, and runs IDLE forwards beside the others'. core/sharing.py says how forwards meet. Raises
    EngineStoppedError where another has ended."""
    if sharers is None:
        step()
        return
    try:
        step()
        is_busy = sharers.end_step() or has_work()
    except RanksLostError as error:
        if error.ranks not in (sharers.communicator, sharers.experts):
            raise  # a rank of this engine, whose watch says how it ended
        raise EngineStoppedError("another engine that shares experts has ended") from error
    if not is_busy:
        time.sleep(_PAUSE)


def meet_for(sharers: ExpertSharers, what: str) -> None:
    """Wait, without a round in flight, until all engines are asked for the same. Raises ConfigError
    where they are asked for different things."""
    sharers.meet()
    asked = crc32(what.encode())
    most, least = sharers.communicator.greatest([asked, -asked])
    if most != -least:
        raise ConfigError(
            "engines that share experts were asked for different things at once, as weights, or to "
            "sleep and to wake: ask again"
        )


def share_rounds(sharers: ExpertSharers | None, rounds: RoundExecutor) -> None:
    """Rounds of all ranks are of one shape from now on."""
    if sharers is not None:
        rounds.agreement = sharers.rounds = AgreedRounds(sharers, rounds)


def check_sharers(config: EngineConfig, sharers: ExpertSharers | None) -> None:
    """Raises ConfigError where a configuration asks for several engines and this is to be the only
    one."""
    if sharers is None and config.parallel.dp_size > 1:
        raise ConfigError("--dp-size is for `serve`; leave it out")


def share_experts(
    sharers: ExpertSharers | None, runners: Sequence[ModelRunner], feature_size: int | None
) -> None:
    """runners: of the target, and of the drafter's models. feature_size: width of what those take
    in beside tokens. Raises ConfigError where the target has no experts."""
    if sharers is None:
        return
    shared = [one for one in runners if _has_experts(one)]
    if runners[0] not in shared:
        raise ConfigError(
            "--enable-dp-attention shares experts, and the model has none: --dp-size alone gives "
            "each engine a copy of the model"
        )
    sharers.forget_models()
    for one in shared:
        width = None if one is runners[0] else feature_size
        one.sharers, one.number = sharers, sharers.add_model(partial(run_idle, one, width))


@torch.inference_mode()
def run_idle(runner: ModelRunner, feature_size: int | None) -> None:
    """A forward on no tokens, beside ranks that have some."""
    batch = runner.new_forward_batch(ModelWorkerBatch.idle())
    if feature_size is not None:
        assert isinstance(runner.model, nn.Module)
        dtype = next(runner.model.parameters()).dtype
        batch.features = torch.empty(0, feature_size, dtype=dtype, device=runner.device)
    runner.forward_idle(batch)


def _has_experts(runner: ModelRunner) -> bool:
    assert isinstance(runner.model, nn.Module)
    return any(isinstance(one, SparseMLP) for one in runner.model.modules())
