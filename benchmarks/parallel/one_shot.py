"""A candidate for runner/communicators: an all-reduce in one kernel over memory that two GPUs have
mapped of each other (PyTorch's symmetric memory). two_cards.py measures it beside NCCL.

For few rows, where NCCL's start takes longer than its transfer. Every rank reads what all have
written and adds it up; two numbers have one sum in either order, so that both ranks get the same
bits. More ranks would need one order for all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, _SymmetricMemory

from specengine.runner.communicators.torch_distributed import TorchCommunicator

_GROUP = "specengine"
LARGEST = 256 << 10  # bytes


class OneShot:
    """Kernels of one stream take turns with its buffer."""

    def __init__(self, ranks: TorchCommunicator, dtype: torch.dtype) -> None:
        assert ranks.size == 2
        symmetric: Any = _SymmetricMemory
        store = PrefixStore("symmetric", ranks.store)
        symmetric.set_group_info(_GROUP, ranks.rank, ranks.size, store)
        card = torch.device("cuda", torch.cuda.current_device())
        count = LARGEST // dtype.itemsize
        self.buffer: Tensor = symmetric.empty_strided_p2p((count,), (1,), dtype, card, _GROUP)
        symmetric.rendezvous(self.buffer, _GROUP)

    def all_reduce(self, x: Tensor) -> Tensor:
        """x: of the buffer's dtype, at most LARGEST bytes, a multiple of 16."""
        place = self.buffer[: x.numel()]
        out: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(place, x.flatten(), "sum", _GROUP)
        return out.view(x.shape)
