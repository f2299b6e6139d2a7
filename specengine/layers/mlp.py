"""The gated feed-forward layer (SwiGLU, Shazeer 2020)."""

from __future__ import annotations

from torch import Tensor, nn

from specengine.kernels.linear.activation import silu_and_mul
from specengine.layers.linear import Linear, MergedLinear


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_up_proj = MergedLinear(hidden_size, [intermediate_size] * 2, bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias)

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden_size] -> the same shape."""
        out: Tensor = self.down_proj(silu_and_mul(self.gate_up_proj(x)))
        return out

    def parts(self, x: Tensor) -> Tensor:
        """The same, perhaps in parts, for RMSNorm.add."""
        return self.down_proj.parts(silu_and_mul(self.gate_up_proj(x)))
