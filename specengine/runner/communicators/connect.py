"""The communicator of a rank, by what it runs on."""

from __future__ import annotations

import torch
from torch._C._distributed_c10d import Store

from specengine.runner.communicators.torch_distributed import TorchCommunicator


def connect(
    store: Store, rank: int, size: int, device: torch.device, symm_mem: bool
) -> TorchCommunicator:
    """Waits until all ranks are there. symm_mem: --enable-symm-mem, the same on all ranks."""
    if symm_mem and device.type == "cuda" and size == 2:
        from specengine.runner.communicators.one_shot import OneShotCommunicator

        return OneShotCommunicator(store, rank, size, device)
    return TorchCommunicator(store, rank, size, device)
