"""A linear layer with an FP8 weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specengine.kernels.dispatch import Backend, use_triton
from specengine.kernels.linear import fp8_linear_cuda, fp8_linear_ref, rounded_cuda
from specengine.kernels.linear.fp8_codes import splits_by_block
from specengine.kernels.linear.linear_format import LinearFormat
from specengine.kernels.linear.quantised import Fp8Input, Fp8Weight, join_fp8
from specengine.kernels.linear.rounded import found_beside

MAX_FEW_ROWS = 64  # up to which a row's sum has one order whatever rows are beside it
MAX_ROWS = 256  # up to which passes over codes cost less than a whole weight of 16 bits
# Outputs at most: rows up to which Triton's kernels are faster than PyTorch's scaled product.
_MOST_ROWS = {4224: 256, 6144: 128}


def fp8_linear(
    x: Tensor, weight: Fp8Weight, bias: Tensor | None = None, *, backend: Backend = "auto"
) -> Tensor:
    """``round_input(x) @ w.T + bias`` with w and the rounding of x as `weight` states them.

    x: [T, K], bias: [N] or None -> [T, N] of x's dtype. Sums are float32. Any device. On a GPU the
    first few rows are multiplied in CUDA C++ where it takes them (fp8_linear_cuda.py), up to 256
    in Triton, codes of both sides as they are where it takes them (fp8_codes_triton.py): up to
    MAX_FEW_ROWS with the same bits. Where scales are by row, PyTorch's scaled product multiplies
    more than 64 of bfloat16, of few outputs more than 128 or 256. Else more are multiplied with a
    weight that is dequantised for it.
    """
    if not len(x):  # of an idle rank: the weight is not looked at
        return x.new_empty(0, weight.shape[0])
    if backend == "cuda" or (backend == "auto" and fp8_linear_cuda.takes(x, weight)):
        assert weight.input is not None
        codes, scale = quantise_rows(x, weight.input)
        return fp8_linear_cuda.fp8_linear(codes, scale, weight, bias, x.dtype)
    if not use_triton(backend, x):
        return fp8_linear_ref.fp8_linear(x, weight, bias)
    from specengine.kernels.linear import fp8_codes_triton, fp8_linear_triton

    are_codes = fp8_codes_triton.takes(x, weight)
    if backend == "auto" and len(x) > _most_rows(x, weight, are_codes):
        multiply = _scaled_product if scales_product(x, weight) else _dequantised_product
        return multiply(x, weight, bias)
    if weight.input is None or not are_codes:
        return fp8_linear_triton.fp8_linear(x.contiguous(), weight, bias)
    codes, scale = quantise_rows(x, weight.input, backend=backend)
    return fp8_codes_triton.fp8_linear(codes, scale, weight, bias, x.dtype)


def _most_rows(x: Tensor, weight: Fp8Weight, are_codes: bool) -> int:
    """As measured beside what more are multiplied by (benchmarks/kernels/fp8_products.py).
    are_codes: whether they are multiplied as they are."""
    if not scales_product(x, weight):
        return MAX_ROWS
    if not are_codes:
        return MAX_FEW_ROWS
    return next(
        (rows for outs, rows in _MOST_ROWS.items() if weight.shape[0] <= outs), MAX_FEW_ROWS
    )


def fp8_parts(x: Tensor, weight: Fp8Weight) -> Tensor | None:
    """`fp8_linear` without a bias as float32 parts [P, T, N], which norm.sum_add_rms_norm adds up
    to the same bits. None where it is not split: on a GPU up to 64 rows of a weight in blocks are,
    unless its outputs are many."""
    if not 0 < len(x) <= MAX_FEW_ROWS or not use_triton("auto", x) or weight.input is None:
        return None
    from specengine.kernels.linear import fp8_codes_triton

    splits = splits_by_block(*weight.shape)
    is_by_block = weight.columns < weight.shape[1]
    if splits == 1 or not is_by_block or not fp8_codes_triton.takes(x, weight):
        return None
    parts = torch.empty((splits, len(x), weight.shape[0]), dtype=torch.float32, device=x.device)
    rounded = quantise_rows(x, weight.input)
    return fp8_codes_triton.fp8_linear(*rounded, weight, None, x.dtype, parts=parts)


def scales_product(x: Tensor, weight: Fp8Weight) -> bool:
    """Whether torch._scaled_mm can take them: a scale a row on both sides, whole 16 bytes."""
    rows, columns = weight.shape
    is_by_row = weight.columns >= columns and weight.rows in (1, rows)
    aligned = rows % 16 == 0 and columns % 16 == 0
    return weight.input is not None and is_by_row and aligned and x.dtype == torch.bfloat16


def _scaled_product(x: Tensor, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
    assert weight.input is not None
    codes, scale = quantise_rows(x, weight.input)
    by_row = weight if weight.rows == 1 else weight.by_row()
    out = torch._scaled_mm(
        codes, by_row.codes.t(), scale, by_row.scale.view(1, -1), out_dtype=x.dtype
    )
    return out if bias is None else out + bias


def _dequantised_product(x: Tensor, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
    from specengine.kernels.linear import dequantise_triton

    if weight.input is None:
        return F.linear(x, dequantise_triton.dequantise(weight, x.dtype), bias)
    rounded = quantise_rows(x, weight.input, backend="triton")
    return F.linear(*dequantise_triton.dequantise_both(*rounded, weight, x.dtype), bias)


def quantise_rows(x: Tensor, form: Fp8Input, *, backend: Backend = "auto") -> tuple[Tensor, Tensor]:
    """x: [T, K] -> codes float8_e4m3fn [T, K] and scales float32 [T, K / group], [T, 1] where the
    whole row has one; x is about codes * scales. Values beyond the published scale are clipped."""
    kept = found_beside(x, form)
    if kept is not None:
        return kept
    if rounded_cuda.takes(x, x.shape[1], form, backend):
        return rounded_cuda.quantise_rows(x)
    if use_triton(backend, x):
        from specengine.kernels.linear import fp8_linear_triton

        return fp8_linear_triton.quantise_rows(x, form)
    return fp8_linear_ref.quantise_rows(x, form)


FORMAT = LinearFormat(
    Fp8Weight,
    "FP8",
    join=join_fp8,
    take_rows=lambda weight, rows: weight.take_rows(rows),
    multiply=fp8_linear,
    parts=fp8_parts,
    input=lambda weight: weight.input,
    completes_input=True,
)
