"""Whole weights of 8 and 4 bits in the type of activations, for products of many rows."""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specengine.kernels.linear.quantised import Fp8Weight, IntWeight

_BLOCK = 512  # columns of a program


@triton.jit
def _fp8_kernel(
    codes_ptr,
    scale_ptr,
    out_ptr,
    columns,
    scale_rows,
    scale_columns,
    scale_parts,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < columns
    codes = tl.load(codes_ptr + row * columns + cols, mask=mask, other=0.0).to(tl.float32)
    place = (row // scale_rows) * scale_parts + cols // scale_columns
    scale = tl.load(scale_ptr + place, mask=mask, other=0.0)
    tl.store(out_ptr + row * columns + cols, (codes * scale).to(out_ptr.dtype.element_ty), mask)


@triton.jit
def _int_kernel(
    codes_ptr,
    scale_ptr,
    zero_ptr,
    out_ptr,
    columns,
    group,
    BITS: tl.constexpr,
    MIDDLE: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < columns
    if BITS == 4:
        held = tl.load(codes_ptr + row * (columns // 2) + cols // 32 * 16 + cols % 16, mask, 0)
        codes = (held >> (cols % 32 // 16 * 4).to(tl.uint8)) & 15
    else:
        codes = tl.load(codes_ptr + row * columns + cols, mask=mask, other=0)
    place = row * (columns // group) + cols // group
    scale = tl.load(scale_ptr + place, mask=mask, other=0.0).to(tl.float32)
    zero = MIDDLE
    if HAS_ZERO:
        zero = tl.load(zero_ptr + place, mask=mask, other=0).to(tl.float32)
    weight = (codes.to(tl.float32) - zero) * scale
    tl.store(out_ptr + row * columns + cols, weight.to(out_ptr.dtype.element_ty), mask)


def dequantise(weight: Fp8Weight | IntWeight, dtype: torch.dtype) -> Tensor:
    """[N, K], columns in the order of the codes."""
    rows, columns = weight.shape
    out = torch.empty((rows, columns), dtype=dtype, device=weight.codes.device)
    grid = rows, triton.cdiv(columns, _BLOCK)
    if isinstance(weight, Fp8Weight):
        parts = weight.scale.shape[1]
        given = weight.codes, weight.scale, out, columns, weight.rows, weight.columns, parts
        _fp8_kernel[grid](*given, BLOCK=_BLOCK)
        return out
    zero = weight.codes if weight.zero is None else weight.zero
    _int_kernel[grid](
        weight.codes,
        weight.scale,
        zero,
        out,
        columns,
        weight.group,
        BITS=weight.bits,
        MIDDLE=weight.middle,
        HAS_ZERO=weight.zero is not None,
        BLOCK=_BLOCK,
    )
    return out
