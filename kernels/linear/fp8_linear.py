"""A linear layer with an FP8 weight."""

from __future__ import annotations

from torch import Tensor

from specengine.kernels.dispatch import Backend
from specengine.kernels.linear import fp8_linear_ref
from specengine.kernels.linear.quantised import Fp8Input, Fp8Weight


def fp8_linear(
    x: Tensor, weight: Fp8Weight, bias: Tensor | None = None, *, backend: Backend = "auto"
) -> Tensor:
    """``round_input(x) @ w.T + bias`` with w and the rounding of x as `weight` states them.

    x: [T, K], bias: [N] or None -> [T, N] of x's dtype. Sums are float32. Any device.
    """
    return fp8_linear_ref.fp8_linear(x, weight, bias)


def quantise_rows(x: Tensor, form: Fp8Input, *, backend: Backend = "auto") -> tuple[Tensor, Tensor]:
    """x: [T, K] -> codes float8_e4m3fn [T, K] and scales float32 [T, K / group], [T, 1] where the
    whole row has one; x is about codes * scales. Values beyond the published scale are clipped."""
    return fp8_linear_ref.quantise_rows(x, form)
