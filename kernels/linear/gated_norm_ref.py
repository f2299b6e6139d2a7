"""Gated RMS norm in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    normed = weight * (x * scale).to(gate.dtype)
    return (normed * F.silu(gate.float())).to(gate.dtype).flatten(1)
