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

# The one-row kernel holds a whole weight row in a tile.
MAX_TILE = 4096


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
def _one_row_kernel(
    x_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    num_outs,
    hidden,
    eps,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    DEPENDENT: tl.constexpr,
    OUTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    outs = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    cols = tl.arange(0, BLOCK_K)
    is_out, is_col = outs < num_outs, cols < hidden
    place = weight_ptr + outs[:, None].to(tl.int64) * hidden + cols[None, :]
    mask = is_out[:, None] & is_col[None, :]
    if DEPENDENT:
        gdc_launch_dependents()
    w = tl.load(place, mask=mask, other=0.0)
    if GATED:
        w_up = tl.load(place + num_outs.to(tl.int64) * hidden, mask=mask, other=0.0)
    if HAS_NORM:
        gain = tl.load(norm_ptr + cols, mask=is_col, other=0.0)
    if DEPENDENT:
        gdc_wait()
    x = tl.load(x_ptr + cols, mask=is_col, other=0.0)
    if HAS_NORM:
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / hidden + eps)
        x = (wide * scale).to(x_ptr.dtype.element_ty) * gain
    x = x.to(tl.float32)[None, :]
    product = tl.sum(x * w.to(tl.float32), axis=1)
    if GATED:
        product = _gated(product, tl.sum(x * w_up.to(tl.float32), axis=1), x_ptr)
    product = _finish(
        product, x_ptr, bias_ptr, residual_ptr, outs, outs, is_out, is_out, HAS_BIAS, HAS_RESIDUAL
    )
    tl.store(out_ptr + outs, product, mask=is_out)


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
def _rows_kernel(
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


def tile_for(rows: int, outs: int, hidden: int, gated: bool) -> Tile:
    """Measured on an H200 (benchmarks/results, few-row-linear)."""
    block_k = triton.next_power_of_2(hidden)
    if rows == 1 and block_k <= MAX_TILE:
        return Tile(16 if outs > 8192 else 4 if outs < 1024 or gated else 8, block_k, 4)
    if outs > 8192:
        return Tile(64, min(block_k, 128), 4)
    return Tile(16, min(block_k, 512 if hidden > 1024 else 256), 4)


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
    tile = tile_for(num_rows, num_outs, hidden, gated)
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
    grid = (triton.cdiv(num_outs, tile.outs),)
    if num_rows == 1 and tile.block_k >= hidden:
        _one_row_kernel[grid](*tensors, num_outs, hidden, eps, **options)
        return out
    stride_residual = residual.stride(0) if residual is not None else 0
    rows = max(16, triton.next_power_of_2(num_rows))
    _rows_kernel[grid](
        *tensors,
        num_rows,
        num_outs,
        hidden,
        x.stride(0),
        stride_residual,
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
