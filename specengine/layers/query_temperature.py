"""Queries scaled by their position."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class QueryTemperature:
    """Queries at position p, from 0, times ``1 + scale * ln(1 + floor((p + 1) / step))``
    (Llama 4)."""

    step: float  # tokens
    scale: float

    def scaled(self, q: Tensor, positions: Tensor) -> Tensor:
        """[T, N], int64 [T] -> [T, N]."""
        steps = torch.floor((positions.float() + 1.0) / self.step)
        factors = torch.log1p(steps) * self.scale + 1.0
        return (q * factors[:, None]).to(q.dtype)
