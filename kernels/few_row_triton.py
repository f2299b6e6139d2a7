"""Few-row linear layers in Triton: one program a block of output features, all rows at once.

A program keeps a few whole weight rows in flight, so that the time is one trip to memory. With one
row it multiplies and reduces; with more it uses the matrix units on rows padded to 16.
"""

# A jit body only looks like typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _inverse_rms(x_ptr, rows, num_rows, stride_x, hidden, eps, BLOCK_K: tl.constexpr):
    """1 / rms of each row, [ROWS] float32; rows past num_rows give 0."""
    total = tl.zeros([rows.shape[0]], dtype=tl.float32)
    for start in range(0, hidden, BLOCK_K):
        cols = start + tl.arange(0, BLOCK_K)
        mask = (rows[:, None] < num_rows) & (cols[None, :] < hidden)
        x = tl.load(x_ptr + rows[:, None] * stride_x + cols[None, :], mask=mask, other=0.0)
        x = x.to(tl.float32)
        total += tl.sum(x * x, axis=1)
    return tl.rsqrt(total / hidden + eps)


@triton.jit
def _products(
    x_ptr,
    norm_ptr,
    weight_ptr,
    outs,
    num_outs,
    rows,
    num_rows,
    stride_x,
    hidden,
    scale,
    HAS_NORM: tl.constexpr,
    USE_DOT: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """x @ weight[outs].T in float32, [ROWS, OUTS]."""
    total = tl.zeros([rows.shape[0], outs.shape[0]], dtype=tl.float32)
    for start in range(0, hidden, BLOCK_K):
        cols = start + tl.arange(0, BLOCK_K)
        is_col = cols < hidden
        w_mask = (outs[:, None] < num_outs) & is_col[None, :]
        w = tl.load(
            weight_ptr + outs[:, None].to(tl.int64) * hidden + cols[None, :], mask=w_mask, other=0.0
        )
        x_mask = (rows[:, None] < num_rows) & is_col[None, :]
        x = tl.load(x_ptr + rows[:, None] * stride_x + cols[None, :], mask=x_mask, other=0.0)
        if HAS_NORM:
            gain = tl.load(norm_ptr + cols, mask=is_col, other=0.0)
            x = (x.to(tl.float32) * scale[:, None]).to(w.dtype) * gain[None, :]
        if USE_DOT:
            total += tl.dot(x, tl.trans(w), input_precision="ieee")
        else:
            wide = x.to(tl.float32)[:, None, :] * w.to(tl.float32)[None, :, :]
            total += tl.sum(wide, axis=2)
    return total


@triton.jit
def _few_row_kernel(
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
    USE_DOT: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    rows = tl.arange(0, ROWS)
    outs = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    scale = tl.zeros([ROWS], dtype=tl.float32)
    if HAS_NORM:
        scale = _inverse_rms(x_ptr, rows, num_rows, stride_x, hidden, eps, BLOCK_K)
    product = _products(
        x_ptr, norm_ptr, weight_ptr, outs, num_outs, rows, num_rows, stride_x, hidden, scale,
        HAS_NORM, USE_DOT, BLOCK_K,
    )  # fmt: skip
    mask = (rows[:, None] < num_rows) & (outs[None, :] < num_outs)
    if HAS_BIAS:
        product += tl.load(bias_ptr + outs, mask=outs < num_outs, other=0.0).to(tl.float32)[None, :]
    if GATED:
        up = _products(
            x_ptr, norm_ptr, weight_ptr + num_outs.to(tl.int64) * hidden, outs, num_outs, rows,
            num_rows, stride_x, hidden, scale, HAS_NORM, USE_DOT, BLOCK_K,
        )  # fmt: skip
        gate = product.to(x_ptr.dtype.element_ty).to(tl.float32)
        gate = (gate / (1.0 + tl.exp(-gate))).to(x_ptr.dtype.element_ty).to(tl.float32)
        product = gate * up.to(x_ptr.dtype.element_ty).to(tl.float32)
    if HAS_RESIDUAL:
        place = residual_ptr + rows[:, None] * stride_residual + outs[None, :]
        rounded = product.to(x_ptr.dtype.element_ty).to(tl.float32)
        product = rounded + tl.load(place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows[:, None] * num_outs + outs[None, :], product, mask=mask)


@dataclass(frozen=True)
class Tile:
    """Shape of one program: output features, depth of a load, and warps."""

    outs: int
    block_k: int
    warps: int


def tile_for(rows: int, outs: int, hidden: int, gated: bool) -> Tile:
    """Enough programs to fill the chip, each with its whole weight tile in flight."""
    block_k = min(triton.next_power_of_2(hidden), 2048 if rows == 1 else 1024)
    if rows > 1:
        return Tile(64 if outs > 8192 else 16, min(block_k, 128 if outs > 8192 else 512), 4)
    if outs > 8192:
        return Tile(16, block_k, 4)
    return Tile(4 if gated or outs < 1024 else 8, block_k, 4)


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
    _few_row_kernel[(triton.cdiv(num_outs, tile.outs),)](
        x,
        norm_weight if norm_weight is not None else x,
        weight,
        bias if bias is not None else x,
        residual if residual is not None else x,
        out,
        num_rows,
        num_outs,
        hidden,
        x.stride(0),
        residual.stride(0) if residual is not None else 0,
        eps,
        HAS_NORM=norm_weight is not None,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        GATED=gated,
        USE_DOT=num_rows > 1,
        ROWS=1 if num_rows == 1 else max(16, triton.next_power_of_2(num_rows)),
        OUTS=tile.outs,
        BLOCK_K=tile.block_k,
        num_warps=tile.warps,
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
