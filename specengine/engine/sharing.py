"""Engines with requests of their own that share experts (--enable-dp-attention)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from zlib import crc32

import torch
from torch import nn

from specengine.core.batch import ModelWorkerBatch
from specengine.core.config import EngineConfig
from specengine.core.errors import ConfigError, EngineStoppedError
from specengine.core.sharing import ExpertSharers
from specengine.engine.loop import Engine
from specengine.engine.outgoing import Choice
from specengine.engine.parts import EngineParts
from specengine.engine.resolve import resolve_device
from specengine.engine.round.executor import RoundExecutor
from specengine.engine.round.shared import AgreedRounds
from specengine.layers.experts import SparseMLP
from specengine.runner.model_runner import ModelRunner

_PAUSE = 1e-3  # seconds between steps in which no rank had anything to do


class SharingEngine(Engine):
    """All ranks step together: one that has no work steps too, and runs IDLE forwards beside the
    others'. core/sharing.py says how forwards meet."""

    def __init__(self, parts: EngineParts) -> None:
        super().__init__(parts)
        assert parts.sharers is not None
        self.sharers = parts.sharers
        self.keeps_turning = True

    def advance(self) -> list[Choice]:
        """Raises EngineStoppedError where another rank has ended."""
        try:
            changed = super().advance()
            is_busy = self.sharers.end_step() or self.has_work
        except RuntimeError as error:
            if "onnection" not in str(error):
                raise
            raise EngineStoppedError("another engine that shares experts has ended") from error
        if not is_busy:
            time.sleep(_PAUSE)
        return changed

    def use_idle_moment(
        self, may_capture: bool = True, is_wanted: Callable[[], bool] = lambda: False
    ) -> bool:
        """Nothing: all ranks capture together, when one first needs a graph."""
        return False

    def update_weights(self, model: str | None = None, draft_model: str | None = None) -> int:
        """Waits until all ranks are asked for it. They must be asked for the same."""
        self.sleeper.require_awake()
        self._meet(f"weights {model} {draft_model}")
        return super().update_weights(model, draft_model)

    def sleep(self, level: int = 1) -> int:
        """Waits until all ranks are asked for it."""
        self._meet(f"sleep {level}")
        return super().sleep(level)

    def wake(self) -> None:
        """Waits until all ranks are asked for it."""
        self._meet("wake")
        super().wake()

    def _meet(self, what: str) -> None:
        """Raises ConfigError where ranks are asked for different things."""
        self.finish_rounds()
        self.sharers.meet()
        asked = crc32(what.encode())
        most, least = self.sharers.communicator.greatest([asked, -asked])
        if most != -least:
            raise ConfigError(
                "engines that share experts were asked for different things at once, as weights, "
                "or to sleep and to wake: ask again"
            )


def meet(config: EngineConfig, rank: int, folder: str) -> ExpertSharers:
    """The engines of --enable-dp-attention, of which this is one. folder: of this run alone. Waits
    for all of them."""
    from torch._C._distributed_c10d import FileStore

    from specengine.runner.communicators.connect import connect

    size, device = config.parallel.dp_size, resolve_device(config.model.device)
    store = FileStore(f"{folder}/store", size)
    return ExpertSharers(connect(store, rank, size, device, config.parallel.enable_symm_mem))


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
