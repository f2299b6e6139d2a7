"""The shared expert's output added to parts, in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def add_shared(parts: Tensor, shared: Tensor, x: Tensor | None, gate: Tensor | None) -> None:
    if x is not None and gate is not None:
        shared = shared * torch.sigmoid(F.linear(x, gate))
    parts[-1] += shared.float()
