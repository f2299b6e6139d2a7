"""Few-row linear layers in Triton: one program a block of output features, all rows at once.

Both kernels start with programmatic dependent launch where the GPU has it: a program fetches its
weights, which nothing before it writes, and only then waits for the kernel before (Hopper and
newer; CUDA programming guide, "Programmatic Dependent Launch").
"""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specengine.kernels.dispatch import has_dependent_launch

# Values of a weight row that a program of one row holds at once.
MAX_TILE = 4096
# Bytes of both operands of a product, which go through shared memory.
MAX_OPERANDS = 176 * 1024


@triton.jit
def _finish(
    product, x_ptr, bias_ptr, residual_ptr, place, outs, mask, out_mask,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Bias and residual, each added to the product rounded to x's dtype, as unfused code does."""
    if HAS_BIAS:
        product += tl.load(bias_ptr + outs, mask=out_mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        rounded = product.to(x_ptr.dtype.element_ty).to(tl.float32)
        product = rounded + tl.load(residual_ptr + place, mask=mask, other=0.0).to(tl.float32)
    return product


@triton.jit
def _gated(gate, up, x_ptr):
    """silu(gate) * up with the roundings of the unfused operations."""
    gate = gate.to(x_ptr.dtype.element_ty).to(tl.float32)
    gate = (gate / (1.0 + tl.exp(-gate))).to(x_ptr.dtype.element_ty).to(tl.float32)
    return gate * up.to(x_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def _multiply(x, w, ROWS: tl.constexpr):
    """x [ROWS, K] @ w [OUTS, K].T, float32 [ROWS, OUTS]."""
    if ROWS == 1:
        return tl.sum(x.to(tl.float32) * w.to(tl.float32), axis=1)[None, :]
    return tl.dot(x, tl.trans(w), input_precision="ieee")


@triton.jit
def _whole_row_kernel(
    x_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    num_rows,
    num_outs,
    hidden,
    stride_x,
    stride_residual,
    eps,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    DEPENDENT: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_K >= hidden: all of a program's weights are in flight before anything waits."""
    rows = tl.arange(0, ROWS)
    outs = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    cols = tl.arange(0, BLOCK_K)
    is_row, is_out, is_col = rows < num_rows, outs < num_outs, cols < hidden
    place = weight_ptr + outs[:, None].to(tl.int64) * hidden + cols[None, :]
    w_mask = is_out[:, None] & is_col[None, :]
    if DEPENDENT:
        gdc_launch_dependents()
    w = tl.load(place, mask=w_mask, other=0.0)
    if GATED:
        w_up = tl.load(place + num_outs.to(tl.int64) * hidden, mask=w_mask, other=0.0)
    if HAS_NORM:
        gain = tl.load(norm_ptr + cols, mask=is_col, other=0.0)
    if DEPENDENT:
        gdc_wait()
    x_mask = is_row[:, None] & is_col[None, :]
    x = tl.load(x_ptr + rows[:, None] * stride_x + cols[None, :], mask=x_mask, other=0.0)
    if HAS_NORM:
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / hidden + eps)
        x = (wide * scale[:, None]).to(x_ptr.dtype.element_ty) * gain[None, :]
    product = _multiply(x, w, ROWS)
    if GATED:
        product = _gated(product, _multiply(x, w_up, ROWS), x_ptr)
    mask = is_row[:, None] & is_out[None, :]
    product = _finish(
        product, x_ptr, bias_ptr, residual_ptr, rows[:, None] * stride_residual + outs[None, :],
        outs[None, :], mask, is_out[None, :], HAS_BIAS, HAS_RESIDUAL,
    )  # fmt: skip
    tl.store(out_ptr + rows[:, None] * num_outs + outs[None, :], product, mask=mask)


@triton.jit
def _inverse_rms(x_ptr, rows, num_rows, stride_x, hidden, eps, BLOCK_K: tl.constexpr):
    """1 / rms of each row, float32 [ROWS]."""
    total = tl.zeros([rows.shape[0]], dtype=tl.float32)
    for start in range(0, hidden, BLOCK_K):
        cols = start + tl.arange(0, BLOCK_K)
        mask = (rows[:, None] < num_rows) & (cols[None, :] < hidden)
        x = tl.load(x_ptr + rows[:, None] * stride_x + cols[None, :], mask=mask, other=0.0)
        x = x.to(tl.float32)
        total += tl.sum(x * x, axis=1)
    return tl.rsqrt(total / hidden + eps)


@triton.jit
def _looped_kernel(
    x_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    num_rows,
    num_outs,
    hidden,
    stride_x,
    stride_residual,
    eps,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    DEPENDENT: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    rows = tl.arange(0, ROWS)
    outs = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    is_row, is_out = rows < num_rows, outs < num_outs
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    if HAS_NORM:
        scale = _inverse_rms(x_ptr, rows, num_rows, stride_x, hidden, eps, BLOCK_K)
    product = tl.zeros([ROWS, OUTS], dtype=tl.float32)
    product_up = tl.zeros([ROWS, OUTS], dtype=tl.float32)
    w_place = weight_ptr + outs[:, None].to(tl.int64) * hidden
    for start in range(0, hidden, BLOCK_K):
        cols = start + tl.arange(0, BLOCK_K)
        is_col = cols < hidden
        w_mask = is_out[:, None] & is_col[None, :]
        w = tl.load(w_place + cols[None, :], mask=w_mask, other=0.0)
        x_mask = is_row[:, None] & is_col[None, :]
        x = tl.load(x_ptr + rows[:, None] * stride_x + cols[None, :], mask=x_mask, other=0.0)
        if HAS_NORM:
            gain = tl.load(norm_ptr + cols, mask=is_col, other=0.0)
            x = (x.to(tl.float32) * scale[:, None]).to(w.dtype) * gain[None, :]
        product += tl.dot(x, tl.trans(w), input_precision="ieee")
        if GATED:
            place = w_place + num_outs.to(tl.int64) * hidden + cols[None, :]
            w_up = tl.load(place, mask=w_mask, other=0.0)
            product_up += tl.dot(x, tl.trans(w_up), input_precision="ieee")
    if GATED:
        product = _gated(product, product_up, x_ptr)
    mask = is_row[:, None] & is_out[None, :]
    product = _finish(
        product, x_ptr, bias_ptr, residual_ptr, rows[:, None] * stride_residual + outs[None, :],
        outs[None, :], mask, is_out[None, :], HAS_BIAS, HAS_RESIDUAL,
    )  # fmt: skip
    tl.store(out_ptr + rows[:, None] * num_outs + outs[None, :], product, mask=mask)


@dataclass(frozen=True)
class Tile:
    """Shape of one program: output features, depth of a load, and warps."""

    outs: int
    block_k: int
    warps: int


def tile_for(rows: int, outs: int, hidden: int, gated: bool, itemsize: int) -> Tile:
    """Measured on an H200 (benchmarks/results, few-row-linear). Whole weight rows where shared
    memory holds a program's operands."""
    block_k = triton.next_power_of_2(hidden)
    if rows == 1 and block_k <= MAX_TILE:
        wide = 16 if outs > 8192 else 2 if gated else 8
        return Tile(wide if outs >= 960 else 2 if block_k <= 1024 else 4, block_k, 2)
    num_outs = 64 if outs > 8192 else 32 if outs >= 960 else 16
    operands = block_k * (16 + num_outs * (2 if gated else 1)) * itemsize
    if outs > 8192 or operands > MAX_OPERANDS:
        return Tile(num_outs if outs > 8192 else 16, min(block_k, 128), 4)
    return Tile(num_outs, block_k, 8 if num_outs > 16 or block_k > 1024 else 2)


def _launch(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    num_rows, hidden = x.shape
    num_outs = out.shape[1]
    tile = tile_for(num_rows, num_outs, hidden, gated, x.element_size())
    dependent = has_dependent_launch(x)
    tensors = (
        x,
        norm_weight if norm_weight is not None else x,
        weight,
        bias if bias is not None else x,
        residual if residual is not None else x,
        out,
    )
    options = {
        "HAS_NORM": norm_weight is not None,
        "HAS_BIAS": bias is not None,
        "HAS_RESIDUAL": residual is not None,
        "GATED": gated,
        "DEPENDENT": dependent,
        "OUTS": tile.outs,
        "BLOCK_K": tile.block_k,
        "num_warps": tile.warps,
        **({"launch_pdl": True} if dependent else {}),
    }
    is_whole = tile.block_k >= hidden
    kernel = _whole_row_kernel if is_whole else _looped_kernel
    rows = 1 if is_whole and num_rows == 1 else max(16, triton.next_power_of_2(num_rows))
    kernel[(triton.cdiv(num_outs, tile.outs),)](
        *tensors,
        num_rows,
        num_outs,
        hidden,
        x.stride(0),
        residual.stride(0) if residual is not None else 0,
        eps,
        ROWS=rows,
        **options,
    )
    return out


def norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=out_dtype or x.dtype, device=x.device)
    return _launch(x, weight, out, norm_weight, eps, bias)


def norm_gated_linear(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> Tensor:
    out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    return _launch(x, weight, out, norm_weight, eps, gated=True)


def linear_add(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    return _launch(x, weight, torch.empty_like(residual), residual=residual)
