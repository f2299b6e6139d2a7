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
NOT_ROUNDED, WHOLE_ROWS = 0, 1


@dataclass(frozen=True)
class RoundedRows:
    """codes: float8_e4m3fn [T, K]; scale: float32 [T, K / group], or [T, 1] of whole rows."""

    codes: Tensor
    scale: Tensor


def rounding_of(form: Fp8Input | None, columns: int) -> int:
    """How kernels that make rows also round them, by scales of their own: NOT_ROUNDED, WHOLE_ROWS,
    or the columns that share a scale, a power of 2 that divides the row."""
    if form is None or form.scale is not None or columns > MOST_COLUMNS:
        return NOT_ROUNDED
    if form.group is None:
        return WHOLE_ROWS
    is_even = form.group > 1 and form.group.bit_count() == 1 and columns % form.group == 0
    return form.group if is_even else NOT_ROUNDED


def put_beside(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """x, which fp8_linear then multiplies without rounding it. codes, scale: what
    `fp8_linear.quantise_rows` gives of a form that has no published scale."""
    setattr(x, _NAME, RoundedRows(codes, scale))
    return x


def found_beside(x: Tensor, form: Fp8Input) -> tuple[Tensor, Tensor] | None:
    """Codes and scale of x in this form, if a kernel left them."""
    kept: RoundedRows | None = getattr(x, _NAME, None)
    rounding = rounding_of(form, x.shape[1])
    if kept is None or rounding == NOT_ROUNDED:
        return None
    parts = 1 if rounding == WHOLE_ROWS else x.shape[1] // rounding
    return (kept.codes, kept.scale) if kept.scale.shape[1] == parts else None
