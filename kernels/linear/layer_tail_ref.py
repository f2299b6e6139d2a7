"""The tail of a decoder layer in PyTorch."""

from __future__ import annotations

from torch import Tensor

from specengine.kernels.linear import few_row_ref
from specengine.kernels.linear.types import Projection, Tail, TailWeights


def layer_tail(
    heads: Tensor, stream: Tensor, weights: TailWeights, eps: float, following: Projection | None
) -> Tail:
    middle = few_row_ref.linear_add(heads, weights.out, stream)
    gates = few_row_ref.norm_gated_linear(middle, weights.gain, eps, weights.gate_up)
    end = few_row_ref.linear_add(gates, weights.down, middle)
    if following is None:
        return Tail(end, None)
    qkv = few_row_ref.norm_linear(end, following.gain, eps, following.weight, following.bias, None)
    return Tail(end, qkv)
