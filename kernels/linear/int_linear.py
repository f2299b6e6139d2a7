"""A linear layer whose weight has 4 or 8 bits, and whose input has not."""

from __future__ import annotations

from torch import Tensor

from specengine.kernels.dispatch import Backend
from specengine.kernels.linear import int_linear_ref
from specengine.kernels.linear.quantised import IntWeight


def int_linear(
    x: Tensor, weight: IntWeight, bias: Tensor | None = None, *, backend: Backend = "auto"
) -> Tensor:
    """``x @ w.T + bias`` with w as `weight` states it.

    x: [T, K], bias: [N] or None -> [T, N] of x's dtype. Sums are float32. Any device.
    """
    return int_linear_ref.int_linear(x, weight, bias)
