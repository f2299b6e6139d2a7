"""A product in parts, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def split_linear(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    pairs = zip(x.float().chunk(parts, 1), weight.float().chunk(parts, 1), strict=True)
    return torch.stack([inputs @ weights.T for inputs, weights in pairs])
