"""Whole weights of 8 and 4 bits in the type of activations, for products of many rows."""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specengine.kernels.linear.quantised import INT4_CHUNK, Fp8Weight, IntWeight
from specengine.kernels.sizes import cdiv, power_of_2

_BLOCK = 512  # columns of a program


@triton.jit
def _widen_part(
    codes_ptr,
    scale_ptr,
    out_ptr,
    row,
    columns,
    scale_rows,
    scale_parts,
    SCALE_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK columns of a row. SCALE_COLUMNS: columns that share a scale, 0 for all of them."""
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < columns
    row = row.to(tl.int64)
    codes = tl.load(codes_ptr + row * columns + cols, mask=mask, other=0.0).to(tl.float32)
    scale_ptr += (row // scale_rows) * scale_parts
    if SCALE_COLUMNS:
        scale = tl.load(scale_ptr + cols // SCALE_COLUMNS, mask=mask, other=0.0)
    else:
        scale = tl.load(scale_ptr)
    tl.store(out_ptr + row * columns + cols, (codes * scale).to(out_ptr.dtype.element_ty), mask)


@triton.jit
def _fp8_kernel(
    codes_ptr,
    scale_ptr,
    out_ptr,
    columns,
    scale_rows,
    scale_parts,
    SCALE_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    _widen_part(
        codes_ptr, scale_ptr, out_ptr, tl.program_id(0), columns, scale_rows, scale_parts,
        SCALE_COLUMNS, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["x_rows"])
def _fp8_pair_kernel(
    x_codes_ptr,
    x_scale_ptr,
    x_out_ptr,
    codes_ptr,
    scale_ptr,
    out_ptr,
    x_rows,
    columns,
    x_parts,
    scale_rows,
    scale_parts,
    X_SCALE_COLUMNS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows of activations, then those of the weight."""
    row = tl.program_id(0)
    if row < x_rows:
        _widen_part(
            x_codes_ptr, x_scale_ptr, x_out_ptr, row, columns, 1, x_parts, X_SCALE_COLUMNS, BLOCK
        )
    else:
        _widen_part(
            codes_ptr, scale_ptr, out_ptr, row - x_rows, columns, scale_rows, scale_parts,
            SCALE_COLUMNS, BLOCK,
        )  # fmt: skip


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


@triton.jit
def _four_columns(words, zero, scale, SHIFT: tl.constexpr):
    """Of 4 bytes of codes the low halves (SHIFT 0) or the high ones (4). words: int32 [A, B]; zero,
    scale: float32 [A] -> float32 [A, 4 B]. A code is put into the mantissa of 2 ** 23: no
    conversion of integers, of which a multiprocessor makes few."""
    first = _minus(words >> SHIFT, zero, scale)
    second = _minus(words >> (SHIFT + 8), zero, scale)
    third = _minus(words >> (SHIFT + 16), zero, scale)
    fourth = _minus(words >> (SHIFT + 24), zero, scale)
    joined = tl.join(tl.join(first, third), tl.join(second, fourth))
    return tl.reshape(joined, (words.shape[0], 4 * words.shape[1]))


@triton.jit
def _minus(words, zero, scale):
    code = ((words & 15) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    return (code - zero[:, None]) * scale[:, None]


@triton.jit
def _int4_kernel(
    words_ptr,
    scale_ptr,
    zero_ptr,
    out_ptr,
    chunks,  # of 32 columns, of a row
    GROUP: tl.constexpr,  # chunks
    HAS_ZERO: tl.constexpr,
    BLOCK: tl.constexpr,  # chunks
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = chunk < chunks
    place = row * (chunks // GROUP) + chunk // GROUP
    scale = tl.load(scale_ptr + place, mask=mask, other=0.0).to(tl.float32)
    zero = tl.full((BLOCK,), 8.0, tl.float32)
    if HAS_ZERO:
        zero = tl.load(zero_ptr + place, mask=mask, other=0).to(tl.float32)
    word = (row * chunks + chunk)[:, None] * 4 + tl.arange(0, 4)[None, :]
    words = tl.load(words_ptr + word, mask=mask[:, None], other=0)
    to = out_ptr + (row * chunks + chunk)[:, None] * 32 + tl.arange(0, 16)[None, :]
    wide: tl.constexpr = out_ptr.dtype.element_ty
    tl.store(to, _four_columns(words, zero, scale, 0).to(wide), mask=mask[:, None])
    tl.store(to + 16, _four_columns(words, zero, scale, 4).to(wide), mask=mask[:, None])


def dequantise_both(
    codes: Tensor, scale: Tensor, weight: Fp8Weight, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Rounded activations and the weight that multiplies them, by one kernel. codes, scale: as
    fp8_linear.quantise_rows gives them -> [T, K], [N, K]."""
    rows, columns = weight.shape
    x = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    out = torch.empty((rows, columns), dtype=dtype, device=codes.device)
    block, warps = _fp8_program(columns)
    parts = scale.shape[1]
    _fp8_pair_kernel[len(codes) + rows, cdiv(columns, block)](
        codes,
        scale,
        x,
        weight.codes,
        weight.scale,
        out,
        len(codes),
        columns,
        parts,
        weight.rows,
        weight.scale.shape[1],
        X_SCALE_COLUMNS=_shared(columns // parts, columns),
        SCALE_COLUMNS=_shared(weight.columns, columns),
        BLOCK=block,
        num_warps=warps,
    )
    return x, out


def _shared(one: int, columns: int) -> int:
    """Columns that share a scale, 0 for all."""
    return one if one < columns else 0


def _fp8_program(columns: int) -> tuple[int, int]:
    """Columns of a program and its warps, whose threads take 16 bytes of codes each."""
    block = min(max(power_of_2(columns), 512), 2048)
    return block, block // 512


def dequantise(weight: Fp8Weight | IntWeight, dtype: torch.dtype) -> Tensor:
    """[N, K], columns in the order of the codes."""
    rows, columns = weight.shape
    out = torch.empty((rows, columns), dtype=dtype, device=weight.codes.device)
    grid = rows, cdiv(columns, _BLOCK)
    if isinstance(weight, Fp8Weight):
        block, warps = _fp8_program(columns)
        _fp8_kernel[rows, cdiv(columns, block)](
            weight.codes,
            weight.scale,
            out,
            columns,
            weight.rows,
            weight.scale.shape[1],
            SCALE_COLUMNS=_shared(weight.columns, columns),
            BLOCK=block,
            num_warps=warps,
        )
        return out
    zero = weight.codes if weight.zero is None else weight.zero
    if weight.bits == 4 and weight.group % INT4_CHUNK == 0:
        chunks, block = columns // INT4_CHUNK, 128
        _int4_kernel[rows, cdiv(chunks, block)](
            weight.codes.view(torch.int32),
            weight.scale,
            zero,
            out,
            chunks,
            GROUP=weight.group // INT4_CHUNK,
            HAS_ZERO=weight.zero is not None,
            BLOCK=block,
        )
        return out
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
