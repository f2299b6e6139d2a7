"""Gated activation in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def act_and_mul(x: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
    gate, up = x.chunk(2, -1)
    return act(gate) * up
