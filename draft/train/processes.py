"""The processes of a training run: one, or as many as torchrun started, a device each."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from specengine.core.errors import ConfigError

_GLOO = "pt_gloo_runloop"  # as PyTorch calls the threads
_RESTS, _REST, _LONGEST = 3, 0.01, 10.0  # in a row; seconds between two looks, and of all


@dataclass(frozen=True)
class Processes:
    rank: int
    count: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def random_devices(self) -> list[torch.device]:
        """Devices beside the CPU whose random streams the run draws from."""
        return [self.device] if self.device.type == "cuda" else []

    def sum(self, values: Tensor) -> Tensor:
        """Added up over the processes, in place."""
        if self.count > 1:
            dist.all_reduce(values)
        return values

    def most(self, *values: float) -> list[float]:
        """The largest of each, over the processes."""
        if self.count == 1:
            return list(values)
        shared = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return [float(value) for value in shared]

    def gather(self, value: Any) -> list[Any]:
        """The value of each process, in order of rank."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value)
        return values

    def wait(self) -> None:
        if self.count > 1:
            dist.barrier()

    def place(self, module: nn.Module) -> None:
        """Move a module to the device and shard its parameters (FSDP2): each layer by itself, and
        the rest together. Every process must hold the same weights before."""
        module.to(self.device)
        if self.count == 1:
            return
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.device.type, (self.count,))
        lists = [one for one in module.modules() if isinstance(one, nn.ModuleList)]
        for layer in (layer for one in lists for layer in one):
            fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)

    @contextmanager
    def gathered(self, module: nn.Module) -> Iterator[None]:
        """Sharded parameters are whole inside. Every process must come here."""
        from torch.distributed.fsdp import FSDPModule

        shards = [one for one in module.modules() if isinstance(one, FSDPModule)]
        for shard in shards:
            shard.unshard()
        try:
            yield
        finally:
            for shard in shards:
                shard.reshard()

    def close(self) -> None:
        if self.count > 1:
            dist.destroy_process_group()
            let_gloo_rest()


def start_processes(device: str) -> Processes:
    """What torchrun's environment says; without it, one process. Raises ConfigError for CUDA where
    there is none."""
    on_gpu = torch.cuda.is_available() if device == "auto" else device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise ConfigError("run.device=cuda: PyTorch sees no CUDA device here; use run.device=cpu")
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        return Processes(0, 1, torch.device("cuda" if on_gpu else "cpu"))
    place = torch.device("cpu")
    if on_gpu:
        place = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(place)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=place if on_gpu else None)
    return Processes(dist.get_rank(), count, place)


@contextmanager
def chosen_by_rules(device: torch.device) -> Iterator[None]:
    """Code that is compiled inside, for a GPU, has forms that rules choose. Else forms of a
    reduction are timed and the fastest taken, and forms sum in different orders: two equal runs
    would end with different bits."""
    if device.type != "cuda":
        yield
        return
    from torch._inductor import config

    with config.patch(deterministic=True):
        yield


def let_gloo_rest() -> None:
    """Wait until Gloo's threads have let go of the tensors of the last collectives.

    They do so after those who waited go on, and need the interpreter for it: where that has ended,
    they abort the process, whose work is done. Destroying the group does not join them: DTensor's
    caches hold the mesh, and that the group. Threads are read from Linux's /proc; elsewhere it
    does not wait.
    """
    end, rests = time.monotonic() + _LONGEST, 0
    while rests < _RESTS and time.monotonic() < end:
        rests = 0 if _is_gloo_busy() else rests + 1
        time.sleep(_REST)


def _is_gloo_busy() -> bool:
    for task in Path("/proc/self/task").glob("*/stat"):
        with suppress(OSError):  # a thread that has ended
            name, _, state = task.read_text().rpartition(")")
            if name.endswith(_GLOO) and state.split()[0] == "R":
                return True
    return False
