"""Rows that were rounded to FP8 where they were made, for the product that reads them.

A norm or an activation sees whole rows, as rounding must, and so spares the product a kernel. The
rounded form is kept beside the tensor, whose values stay for other readers. The tensor must not be
written to: the rounded form would not follow.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specengine.kernels.linear.quantised import Fp8Input

_NAME = "_rounded_rows"
MOST_COLUMNS = 32768  # that a program rounds


@dataclass(frozen=True)
class RoundedRows:
    """codes: float8_e4m3fn [T, K]; scale: float32 [T, 1]."""

    codes: Tensor
    scale: Tensor


def can_round(form: Fp8Input | None, columns: int) -> bool:
    """Whether kernels that make rows also round them: each by one scale of its own."""
    own = form is not None and form.scale is None and form.group is None
    return own and columns <= MOST_COLUMNS


def put_beside(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """x, which fp8_linear then multiplies without rounding it. codes, scale: what
    `fp8_linear.quantise_rows(x, Fp8Input())` gives."""
    setattr(x, _NAME, RoundedRows(codes, scale))
    return x


def found_beside(x: Tensor, form: Fp8Input) -> tuple[Tensor, Tensor] | None:
    """Codes and scale of x in this form, if a kernel left them."""
    kept: RoundedRows | None = getattr(x, _NAME, None)
    if kept is None or not can_round(form, x.shape[1]):
        return None
    return kept.codes, kept.scale
