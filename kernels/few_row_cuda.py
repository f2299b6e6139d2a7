"""Few-row linear layers in CUDA C++: weights go straight into the matrix unit's registers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specengine.kernels.cuda.program import compiled

_SOURCE = Path(__file__).parent / "cuda" / "few_row.cu"


@dataclass(frozen=True)
class Tile:
    """Shape of one block: outputs (in eights), warps that share the depth, loads in flight."""

    eights: int
    warps: int
    unroll: int


def tile_for(rows: int, hidden: int, gated: bool) -> Tile:
    """Measured on an H200 (benchmarks/results, few-row-linear). Warps and loads depend on the depth
    alone: they decide the order of the sum, so that a row's result does not depend on how many rows
    stand beside it."""
    chunks = -(-hidden // 32)
    warps = min(max(-(-chunks // 3), 4), 16)
    unroll = min(-(-chunks // warps), 6)
    return Tile(4 if gated and rows <= 16 else 2, warps, unroll)


@dataclass(frozen=True)
class Epilogue:
    """What stands around the product."""

    norm_weight: Tensor | None = None
    eps: float = 0.0
    bias: Tensor | None = None
    residual: Tensor | None = None
    gated: bool = False


def _launch(x: Tensor, weight: Tensor, out: Tensor, tile: Tile, around: Epilogue) -> Tensor:
    num_rows, hidden = x.shape
    num_outs = weight.shape[0] // (2 if around.gated else 1)
    row_tiles = -(-num_rows // 16)
    shared = 4 * tile.warps * 16 * row_tiles * (8 * tile.eights * (2 if around.gated else 1) + 1)
    residual = around.residual
    defines = (
        ("TYPE", 0 if x.dtype == torch.bfloat16 else 1),
        ("MT", row_tiles),
        ("NT", tile.eights),
        ("WARPS", tile.warps),
        ("UNROLL", tile.unroll),
        ("NORM", int(around.norm_weight is not None)),
        ("GATED", int(around.gated)),
        ("BIAS", int(around.bias is not None)),
        ("RESIDUAL", int(residual is not None)),
        ("WIDE_OUT", int(out.dtype == torch.float32)),
    )
    kernel = compiled(_SOURCE, "few_row", defines, shared, x.device.index or 0)
    kernel.launch(
        (-(-num_outs // (8 * tile.eights)), 1, 1),
        32 * tile.warps,
        shared,
        (
            x,
            around.norm_weight,
            weight,
            around.bias,
            residual,
            out,
            num_rows,
            num_outs,
            hidden,
            x.stride(0),
            0 if residual is None else residual.stride(0),
            around.eps,
        ),
    )
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    tile = tile_for(x.shape[0], x.shape[1], gated=False)
    return _launch(x, weight, out, tile, Epilogue(bias=bias))


def norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=out_dtype or x.dtype, device=x.device)
    tile = tile_for(x.shape[0], x.shape[1], gated=False)
    return _launch(x, weight, out, tile, Epilogue(norm_weight, eps, bias))


def norm_gated_linear(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> Tensor:
    out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    tile = tile_for(x.shape[0], x.shape[1], gated=True)
    return _launch(x, weight, out, tile, Epilogue(norm_weight, eps, gated=True))


def linear_add(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    out = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
    tile = tile_for(x.shape[0], x.shape[1], gated=False)
    return _launch(x, weight, out, tile, Epilogue(residual=residual))
