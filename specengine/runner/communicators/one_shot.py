"""All-reduces of few rows in one kernel, over memory that two GPUs have mapped of each other."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from specengine.kernels.precompile import current
from specengine.kernels.ranks import pair_sum
from specengine.kernels.ranks.pair_sum import PairSum
from specengine.runner.communicators.mapped_memory import GROUP, MappedMemory
from specengine.runner.communicators.torch_distributed import TorchCommunicator
from specengine.runner.communicators.trial import Trial

logger = logging.getLogger(__name__)

_TRIAL = 20  # seconds that a sum of the trial may wait for the other rank


class SumKernel(Protocol):
    """A kernel that adds up what two ranks have. All of it is called on both ranks, in one order.
    Each step raises RuntimeError where it cannot be."""

    name: str

    def allocate(self) -> None:
        """Does not wait for the other rank."""
        ...

    def map(self) -> None:
        """The other rank's memory, too. Waits for that rank."""
        ...

    def pass_trial(self, trial: Trial) -> None:
        """Ends, whatever the other rank does."""
        ...

    def add_up(self, x: Tensor, stream: Tensor | None) -> Tensor:
        """x: what pair_sum.takes. The sum over ranks or, rounded again, ``stream + `` that."""
        ...


class OwnKernel:
    """That of specengine.kernels.ranks: sum and addition in one, between its neighbours without a
    gap (dependent launch)."""

    name = "pair_sum"

    def __init__(self, memory: MappedMemory) -> None:
        self.memory = memory

    def allocate(self) -> None:
        if not pair_sum.can_run(torch.device("cuda", torch.cuda.current_device())):
            raise RuntimeError("pair_sum needs NVIDIA's Python bindings and a Hopper card or newer")
        self.mailbox = self.memory.allocate(pair_sum.MAILBOX, torch.uint8)

    def map(self) -> None:
        self.sum = PairSum(self.mailbox, self.memory.map(self.mailbox))

    def pass_trial(self, trial: Trial) -> None:
        def run(x: Tensor, stream: Tensor | None) -> Tensor:
            return self.sum(x, stream, gives_up_after=_TRIAL)

        trial.run_in_turns(run)
        trial.run_in_graph(run)

    def add_up(self, x: Tensor, stream: Tensor | None) -> Tensor:
        return self.sum(x, stream)


class PyTorchKernel:
    """PyTorch's, and its addition. It waits for the other rank's at its start and at its end."""

    name = "PyTorch's one-shot all-reduce"

    def __init__(self, memory: MappedMemory) -> None:
        self.memory = memory
        self.buffers: dict[torch.dtype, Tensor] = {}

    def allocate(self) -> None:
        for dtype in pair_sum.DTYPES:
            size = pair_sum.LARGEST // dtype.itemsize
            self.buffers[dtype] = self.memory.allocate(size, dtype)

    def map(self) -> None:
        for buffer in self.buffers.values():
            self.memory.meet(buffer)

    def pass_trial(self, trial: Trial) -> None:
        """Nothing ends its kernel where the other rank does not come: all sums are made before one
        is looked at."""
        trial.run_once(self.add_up)

    def add_up(self, x: Tensor, stream: Tensor | None) -> Tensor:
        own = x.contiguous().view(-1)
        out: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(
            self.buffers[x.dtype][: x.numel()], own, "sum", GROUP
        )
        found = out.view(x.shape)
        return found if stream is None else stream + found


KERNELS: tuple[Callable[[MappedMemory], SumKernel], ...] = (OwnKernel, PyTorchKernel)


class OneShotCommunicator(TorchCommunicator):
    """For two ranks. Each adds up what both have: two numbers have one sum in either order, so that
    both ranks have the same bits, and those of NCCL.

    The first of KERNELS that gives these on both ranks is taken. NCCL does what is larger, what is
    of another type, and all of it where there is no such kernel.
    """

    def __init__(self, store: Store, rank: int, size: int, device: torch.device) -> None:
        """Waits until both ranks are there."""
        self.kernel: SumKernel | None = None
        super().__init__(store, rank, size, device)
        # Whatever fails on one rank alone, the other learns before it waits for that rank: the host
        # at the rendezvous, the kernel on the device.
        memory = MappedMemory(store, rank, size, self._group)
        if self._agreed("symmetric memory", memory.name_group):
            trial = Trial(rank, device, super().all_reduce)
            kernels = (make(memory) for make in KERNELS)
            self.kernel = next((one for one in kernels if self._can_use(one, trial)), None)
        if self.kernel is None:
            logger.warning("all-reduces are NCCL's alone")

    def _can_use(self, kernel: SumKernel, trial: Trial) -> bool:
        steps = kernel.allocate, kernel.map, lambda: kernel.pass_trial(trial)
        return all(self._agreed(kernel.name, step) for step in steps)

    def _agreed(self, name: str, do: Callable[[], None]) -> bool:
        """Whether it has failed on neither rank. Both call this."""
        error: RuntimeError | None = None
        try:
            do()
        except RuntimeError as raised:
            error = raised
            logger.warning("sums of two ranks go without %s: %s", name, error)
        return self.greatest([int(error is not None)]) == [0]

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.kernel is None or not self._takes(x):
            return super().all_reduce(x)
        return self.kernel.add_up(x, None)

    def all_reduce_add(self, x: Tensor, stream: Tensor) -> Tensor:
        if self.kernel is None or not self._takes(x):
            return stream + super().all_reduce(x)
        return self.kernel.add_up(x, stream)

    def _takes(self, x: Tensor) -> bool:
        return x.is_cuda and pair_sum.takes(x) and current() is None
