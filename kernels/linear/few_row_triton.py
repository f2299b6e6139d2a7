"""Linear layers for one row in Triton: a program holds whole weight rows of a block of outputs.

Kernels start with programmatic dependent launch where the GPU has it: a program fetches its
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
from specengine.kernels.sizes import cdiv, power_of_2


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
    """BLOCK_K >= hidden: all of a program's weights are in flight before anything waits."""
    outs = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    cols = tl.arange(0, BLOCK_K)
    is_out, is_col = outs < num_outs, cols < hidden
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
    x = tl.load(x_ptr + cols, mask=is_col, other=0.0)
    if HAS_NORM:
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / hidden + eps)
        x = (wide * scale).to(x_ptr.dtype.element_ty) * gain
    x = x.to(tl.float32)[None, :]
    product = tl.sum(x * w.to(tl.float32), axis=1)
    if GATED:
        product = _gated(product, tl.sum(x * w_up.to(tl.float32), axis=1), x_ptr)
    if HAS_BIAS:
        product += tl.load(bias_ptr + outs, mask=is_out, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        # Both are rounded to x's dtype before they are added, as unfused code does.
        rounded = product.to(x_ptr.dtype.element_ty).to(tl.float32)
        product = rounded + tl.load(residual_ptr + outs, mask=is_out, other=0.0).to(tl.float32)
    tl.store(out_ptr + outs, product, mask=is_out)


@dataclass(frozen=True)
class Tile:
    """Shape of one program: output features, and warps."""

    outs: int
    warps: int


def tile_for(outs: int, block_k: int, gated: bool) -> Tile:
    """Measured on an H200 (benchmarks/results, few-row-linear)."""
    if block_k > 8192:
        return Tile(1, 8)
    if block_k > 2048:
        return Tile(4 if outs > 4096 and not gated else 2, 4)
    wide = 16 if outs > 8192 else 2 if gated else 8
    return Tile(wide if outs >= 960 else 2 if block_k <= 1024 else 4, 2)


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
    num_outs, hidden = out.shape[1], x.shape[1]
    block_k = power_of_2(hidden)
    tile = tile_for(num_outs, block_k, gated)
    dependent = has_dependent_launch(x)
    _one_row_kernel[(cdiv(num_outs, tile.outs),)](
        x,
        norm_weight if norm_weight is not None else x,
        weight,
        bias if bias is not None else x,
        residual if residual is not None else x,
        out,
        num_outs,
        hidden,
        eps,
        HAS_NORM=norm_weight is not None,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        GATED=gated,
        DEPENDENT=dependent,
        OUTS=tile.outs,
        BLOCK_K=block_k,
        num_warps=tile.warps,
        **({"launch_pdl": True} if dependent else {}),
    )
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, into: Tensor | None = None) -> Tensor:
    """into: left as it is."""
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    return _launch(x, weight, out, bias=bias)


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


def linear_add(x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None) -> Tensor:
    out = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
    return _launch(x, weight, out, bias=bias, residual=residual)
