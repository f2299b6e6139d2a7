"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specengine.kernels.linear.norm import fused_add_rms_norm, rms_norm, sum_add_rms_norm


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(normed sum, sum) of a layer's output and the residual stream. Without a residual, the
        stream starts here with x. x: [T, H], or float32 [P, T, H], its parts (Linear.parts)."""
        if residual is None:
            return rms_norm(x, self.weight, self.eps), x
        if x.dim() == 3:
            return sum_add_rms_norm(x, residual, self.weight, self.eps)
        return fused_add_rms_norm(x, residual, self.weight, self.eps)

    def stream(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """The sum alone."""
        if residual is None:
            return x
        return self.add(x, residual)[1] if x.dim() == 3 else x + residual
