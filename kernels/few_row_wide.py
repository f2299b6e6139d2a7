"""Few-row linear layers of wide models in CUDA C++: a stream of weights through shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from specengine.kernels.cuda.products import Around, Products
from specengine.kernels.cuda.program import compiled
from specengine.kernels.dispatch import multiprocessors

MAX_ROWS = 64

_SOURCE = Path(__file__).parent / "cuda" / "few_row_wide.cu"
_CHUNK = 256  # values of the depth of x in shared memory at a time (CHUNK of the source)
_WARPS = 8  # of a block; each takes 16 weight rows
_MAX_TILES = 16384


@dataclass(frozen=True)
class Ring:
    """Through which a warp's weights come: stages, and values of the depth in each."""

    stages: int
    step: int


def ring_for(rows: int) -> Ring:
    """As deep as leaves room for a block of the next kernel beside this one's; for more than 32
    rows there is none."""
    return Ring(3 if rows <= 8 else 2 if rows <= 32 else 4, 128)


@dataclass(frozen=True)
class Meeting:
    """Where blocks that share a tile meet; launches that may overlap must not share it."""

    sums: Tensor  # float32: two tiles of each block, then squares of rows
    counters: Tensor  # int32, a tile each, zeros before and after


@cache
def _meeting(device: torch.device) -> Meeting:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("run a few-row product once before capturing it: it needs memory")
    place = MAX_ROWS * (16 * _WARPS + 1)
    return Meeting(
        torch.empty(2 * multiprocessors(device) * place, dtype=torch.float32, device=device),
        torch.zeros(_MAX_TILES, dtype=torch.int32, device=device),
    )


def _row_tiles(rows: int) -> int:
    """Tiles of 8 rows; few different ones, since each is compiled for itself."""
    tiles = 1
    while 8 * tiles < rows:
        tiles *= 2
    return tiles


def _shared_bytes(ring: Ring, rows: int) -> int:
    weights = 2 * 16 * _WARPS * ring.stages * ring.step
    sums = 4 * rows * (16 * _WARPS + 4)
    squares_and_flag = 4 * rows + 16
    return weights + 2 * rows * _CHUNK * 2 + sums + squares_and_flag


def _launch(x: Tensor, weight: Tensor, out: Tensor, around: Around) -> Tensor:
    num_rows, hidden = x.shape
    num_outs = weight.shape[0] // (2 if around.gated else 1)
    tiles = -(-weight.shape[0] // (16 * _WARPS))
    if num_rows > MAX_ROWS or tiles > _MAX_TILES:
        raise ValueError(f"{num_rows} rows by {weight.shape[0]} outputs are too many")
    row_tiles, ring, residual = _row_tiles(num_rows), ring_for(num_rows), around.residual
    shared = _shared_bytes(ring, 8 * row_tiles)
    defines = (
        ("NT", row_tiles),
        ("WARPS", _WARPS),
        ("STAGES", ring.stages),
        ("STEP", ring.step),
        *around.defines(x, out),
    )
    kernel = compiled(_SOURCE, "few_row_wide", defines, shared, x.device.index or 0)
    meeting = _meeting(x.device)
    kernel.launch(
        (min(tiles * -(-hidden // _CHUNK), multiprocessors(x.device)), 1, 1),
        32 * _WARPS,
        shared,
        (
            x,
            around.norm_weight,
            weight,
            around.bias,
            residual,
            out,
            meeting.sums,
            meeting.counters,
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
