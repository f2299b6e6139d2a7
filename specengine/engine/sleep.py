"""An engine that sleeps: its memory is given back to the machine, and taken again."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import cast

from torch import Tensor, nn

from specengine.core.errors import ConfigError, EngineAsleepError, ModelLoadError
from specengine.core.parallel import Alone, Communicator, on_all
from specengine.core.region import Region
from specengine.engine.new_weights import RunningWeights
from specengine.layers.in_place import weights_of
from specengine.memory.kv_cache import MHATokenToKVPool
from specengine.runner.graph_guard import inputs_of
from specengine.runner.loader.loaded_model import LoadedModel

logger = logging.getLogger(__name__)

LEVELS = (1, 2)


class Sleeper:
    """Weights and KV of one engine. What stays while it sleeps: captured graphs and what they
    allocate, the page table, buffers of rounds, and what libraries keep. The graphs are valid
    afterwards, because all addresses come back.

    Where several ranks have parts of the weights, all make the same calls, and all sleep or none,
    wake or none."""

    def __init__(
        self,
        region: Region | None = None,
        weights: RunningWeights | None = None,
        pools: Sequence[MHATokenToKVPool] = (),
        ranks: Communicator | None = None,
    ) -> None:
        """region: None where nothing is ever given back. ranks: that sleep together."""
        self.level = 0  # 0: awake
        self._region, self._given, self._pools = region, weights, pools
        self._ranks: Communicator = ranks or Alone()
        if region is not None:
            region.users.add(self)

    @property
    def is_asleep(self) -> bool:
        return self.level > 0

    def require_awake(self) -> None:
        """Raises EngineAsleepError."""
        if self.is_asleep:
            raise EngineAsleepError("the engine sleeps; wake it with /wake_up or LLM.wake()")

    def check(self, level: int) -> None:
        """Raises ConfigError where it cannot sleep, on whichever rank."""
        on_all(self._ranks, lambda: self._check(level), "cannot sleep", ConfigError)

    def _check(self, level: int) -> None:
        if self._region is None:
            raise ConfigError("start the engine with --enable-sleep-mode, so that it can sleep")
        if level not in LEVELS:
            raise ConfigError(f"sleep has the levels 1 and 2, not {level}")
        if len(self._region.users) > 1:
            gc.collect()
        if len(self._region.users) > 1:
            raise ConfigError("other engines run on the same weights: let go of them first")
        if level == 2:
            self._weights.check_places()

    def sleep(self, level: int) -> int:
        """Give the memory back, while no round is in flight and no request holds KV.

        level: 1 keeps the weights, on the host, or of a CPU in a file; 2 forgets them, and `wake`
        reads them again from where they came. To be called behind `check`. Returns the bytes given
        back on this rank; 0 where it sleeps already. Raises ConfigError where one rank cannot; then
        nothing has changed.
        """
        if self.is_asleep:
            return 0
        try:
            return on_all(self._ranks, lambda: self._release(level), "cannot sleep", ConfigError)
        except Exception:
            if self.level:  # this rank has given its memory back
                _must(self._restore, "wake again")
            raise

    def _release(self, level: int) -> int:
        assert self._region is not None
        self._region.find = self._tensors
        dropped = [tensor for pool in self._pools for tensor in pool.tensors()]
        if level == 2:
            dropped += (one for model in self._models() for one in weights_of(model))
        start = perf_counter()
        num_bytes = self._region.release(dropped)
        self.level = level
        took, size = perf_counter() - start, num_bytes / (1 << 30)
        logger.info("sleep at level %d: %.2f GiB given back in %.2f s", level, size, took)
        return num_bytes

    def wake(self) -> None:
        """Take the memory again. Raises OutOfMemoryError where another has taken it, or
        ModelLoadError where weights cannot be read again or another rank cannot wake; it sleeps on
        then. Does nothing where it is awake."""
        level = self.level
        try:
            on_all(self._ranks, self._restore, "cannot wake", ModelLoadError)
        except Exception:
            if level and not self.is_asleep:
                _must(lambda: self._release(level), "sleep on")
            raise

    def _restore(self) -> None:
        if not self.is_asleep:
            return
        assert self._region is not None
        start = perf_counter()
        self._region.restore()
        if self.level == 2:
            self._read_again()
        self.level = 0
        logger.info("awake after %.2f s", perf_counter() - start)

    def _read_again(self) -> None:
        try:
            self._weights.put(self._weights.read_again())
        except BaseException:
            self._release(2)
            raise

    @property
    def _weights(self) -> RunningWeights:
        assert self._given is not None, "memory was given back, so there are weights"
        return self._given

    def _models(self) -> Iterator[nn.Module]:
        for model in (self._weights.loaded.model, *self._weights.draft.models):
            yield cast(nn.Module, model)

    def _tensors(self) -> Iterator[Tensor]:
        models = dict(enumerate(self._models()))
        pools = dict(enumerate(self._pools))
        return (one.tensor for one in inputs_of({"models": models, "pools": pools}))


def _must(undo: Callable[[], object], what: str) -> None:
    """After another rank could not do the same. Raises RuntimeError, which ends this rank and with
    it the others: they would differ for good."""
    try:
        undo()
    except Exception as error:
        raise RuntimeError(
            f"this rank cannot {what} after another has failed to do the same: {error}"
        ) from error


def make_sleeper(
    loaded: LoadedModel, weights: RunningWeights, pools: Sequence[MHATokenToKVPool]
) -> Sleeper:
    """It never sleeps without --enable-sleep-mode."""
    if loaded.region is None:
        return Sleeper()
    return Sleeper(loaded.region, weights, pools, loaded.ranks)
