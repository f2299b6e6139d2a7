"""A sigmoid's gate in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    return x * torch.sigmoid(gate.flatten(1))
