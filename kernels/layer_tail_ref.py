"""The tail of a decoder layer in PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from specengine.kernels import few_row_ref

if TYPE_CHECKING:
    from specengine.kernels.layer_tail import Projection, Tail, TailWeights


def layer_tail(
    heads: Tensor, stream: Tensor, weights: TailWeights, eps: float, following: Projection | None
) -> Tail:
    from specengine.kernels.layer_tail import Tail

    middle = few_row_ref.linear_add(heads, weights.out, stream)
    gates = few_row_ref.norm_gated_linear(middle, weights.gain, eps, weights.gate_up)
    end = few_row_ref.linear_add(gates, weights.down, middle)
    if following is None:
        return Tail(end, None)
    qkv = few_row_ref.norm_linear(end, following.gain, eps, following.weight, following.bias, None)
    return Tail(end, qkv)
