"""Few-row linear layers in CUDA C++: weights go straight into the matrix unit's registers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from specengine.kernels.cuda.products import Around, Products
from specengine.kernels.cuda.program import compiled
from specengine.kernels.dispatch import multiprocessors

_SOURCE = Path(__file__).parents[1] / "cuda" / "few_row.cu"
_ROWS = 16  # of a block
_ALONE = 13  # warps of a block beside which a multiprocessor has no room for another
_WIDEST = 5  # eights of outputs of such a block
# Loads of a thread that its registers hold: those of the norm's gain take their part.
_MOST_HELD, _MOST_HELD_BESIDE_GAIN = 20, 16


@dataclass(frozen=True)
class Tile:
    """Shape of one block: outputs (in eights), warps that share the depth, loads in flight."""

    eights: int
    warps: int
    unroll: int


def tile_for(hidden: int, gated: bool) -> Tile:
    """Measured on an H200 (benchmarks/results, few-row-linear). Warps and loads depend on the depth
    alone: they decide the order of the sum, so that a row's result does not depend on how many
    other rows there are. What a thread holds of the weights leaves hardly a register over."""
    chunks = -(-hidden // 32)
    warps = min(max(-(-chunks // 3), 4), 16)
    unroll = min(-(-chunks // warps), 6)
    held, most = (18, 4) if warps < _ALONE else (16, 3)
    return Tile(min(held // unroll // (2 if gated else 1), most), warps, unroll)


def widened(
    tile: Tile, num_outs: int, num_rows: int, processors: int, has_norm: bool, gated: bool
) -> Tile:
    """With as many outputs more as spare a second wave of blocks, where a block takes a whole
    multiprocessor and has the registers. The order of the sums stays."""
    if tile.warps < _ALONE:
        return tile
    held = _MOST_HELD_BESIDE_GAIN if has_norm else _MOST_HELD
    widest = min(held // (tile.unroll * (2 if gated else 1)), _WIDEST)
    for eights in range(tile.eights, widest + 1):
        if -(-num_outs // (8 * eights)) * -(-num_rows // _ROWS) <= processors:
            return replace(tile, eights=eights)
    return tile


def _launch(x: Tensor, weight: Tensor, out: Tensor, around: Around) -> Tensor:
    num_rows, hidden = x.shape
    num_outs = weight.shape[0] // (2 if around.gated else 1)
    tile = tile_for(hidden, around.gated)
    has_norm, processors = around.norm_weight is not None, multiprocessors(x.device)
    tile = widened(tile, num_outs, num_rows, processors, has_norm, around.gated)
    eights = (tile.eights * (2 if around.gated else 1)) | 1
    shared = 4 * tile.warps * _ROWS * (8 * eights + 1)
    residual = around.residual
    defines = (
        ("NT", tile.eights),
        ("WARPS", tile.warps),
        ("UNROLL", tile.unroll),
        *around.defines(x, out),
    )
    kernel = compiled(_SOURCE, "few_row", defines, shared, x.device.index or 0)
    kernel.launch(
        (-(-num_outs // (8 * tile.eights)), -(-num_rows // _ROWS), 1),
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


_products = Products(_launch)
linear = _products.linear
norm_linear = _products.norm_linear
norm_gated_linear = _products.norm_gated_linear
linear_add = _products.linear_add
