"""The shared expert's part of a sum, in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def weigh_shared(shared: Tensor, x: Tensor | None, gate: Tensor | None, out: Tensor) -> None:
    if x is not None and gate is not None:
        shared = shared * torch.sigmoid(F.linear(x, gate))
    out.copy_(shared)
