"""Products of a few rows with FP8 codes on both sides in CUDA C++: weights are on their way while
the kernels ahead still run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specengine.kernels.cuda import program
from specengine.kernels.cuda.program import compiled
from specengine.kernels.dispatch import has_warpgroups
from specengine.kernels.linear import fp8_codes
from specengine.kernels.linear.fp8_codes import BLOCK, splits_by_block, splits_by_row
from specengine.kernels.linear.quantised import Fp8Weight
from specengine.kernels.sizes import cdiv

ROWS = 8  # at most: of more, Triton's kernel reads the weight as fast
OUTS, STEP = 64, 256  # outputs of a block, and columns that it takes at a time

_SOURCE = Path(__file__).parents[1] / "cuda" / "fp8_rows.cu"
_THREADS = 160
_X_SLOTS = 8


@dataclass(frozen=True)
class RowsTile:
    """splits: blocks that share the columns. slots: steps of the weight in shared memory."""

    splits: int
    slots: int

    def shared_bytes(self, columns: int, is_by_block: bool) -> int:
        steps = cdiv(cdiv(columns, STEP), self.splits)
        scales = 4 * ROWS * (STEP // BLOCK) * steps if is_by_block else 0
        return self.slots * OUTS * STEP + _X_SLOTS * (ROWS * STEP + 16) + scales


def tile_for(num_outs: int, columns: int, is_by_block: bool) -> RowsTile:
    """As swept at the layers of an 8B on an H200 (benchmarks/kernels/fp8_products.py)."""
    if is_by_block:  # scales leave less shared memory to a second block of a multiprocessor
        return RowsTile(splits_by_block(num_outs, columns), 8 if columns > 8192 else 5)
    return RowsTile(splits_by_row(num_outs), 8 if columns > 8192 else 6)


def takes(x: Tensor, weight: Fp8Weight) -> bool:
    """Whether the kernel runs here, and computes this product."""
    return len(x) <= ROWS and has_warpgroups(x) and program.available() and computes(x, weight)


def computes(x: Tensor, weight: Fp8Weight) -> bool:
    """What Triton's does, but for blocks of fewer than 128 rows."""
    is_by_row = weight.columns >= weight.shape[1]
    return fp8_codes.computes(x, weight) and (is_by_row or weight.rows % BLOCK == 0)


def fp8_linear(
    codes: Tensor,
    scale: Tensor,
    weight: Fp8Weight,
    bias: Tensor | None,
    dtype: torch.dtype,
    tile: RowsTile | None = None,
) -> Tensor:
    """codes [T, K] and scale [T, 1] or [T, K / 128], T at most ROWS, as `fp8_linear.quantise_rows`
    gives them -> [T, N] of dtype."""
    (num_rows, columns), num_outs = codes.shape, weight.shape[0]
    assert num_rows <= ROWS
    out = torch.empty((num_rows, num_outs), dtype=dtype, device=codes.device)
    is_by_block = weight.columns < columns
    tile = tile or tile_for(num_outs, columns, is_by_block)
    defines = (
        ("TYPE", 0 if dtype == torch.bfloat16 else 1),
        ("SLOTS", tile.slots),
        ("CLUSTER", tile.splits),
        ("BIAS", int(bias is not None)),
        ("BY_BLOCK", int(is_by_block)),
    )
    shared, device = tile.shared_bytes(columns, is_by_block), codes.device.index or 0
    compiled(_SOURCE, "fp8_rows", defines, shared, device).launch(
        (-(-num_outs // OUTS) * tile.splits, 1, 1),
        _THREADS,
        shared,
        (
            codes,
            scale,
            weight.codes,
            weight.scale,
            bias,
            out,
            num_rows,
            num_outs,
            columns,
            codes.stride(0),
            weight.rows,
            scale.shape[1],
        ),
    )
    return out
