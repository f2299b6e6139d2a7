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
from specengine.kernels.linear.quantised import Fp8Weight

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

    @property
    def shared_bytes(self) -> int:
        return self.slots * OUTS * STEP + _X_SLOTS * (ROWS * STEP + 16)


def tile_for(num_outs: int, columns: int) -> RowsTile:
    """As swept at the layers of an 8B on an H200 (benchmarks/kernels/fp8_products.py). Splits are
    those of fp8_linear_triton.tile_for, so that bits are."""
    splits = 1 if num_outs >= 16384 else 2 if num_outs > 2048 else 4
    return RowsTile(splits, 8 if columns > 8192 else 6)


def takes(x: Tensor, weight: Fp8Weight) -> bool:
    """Whether the kernel runs here, and computes this product: half precision, one scale for a
    whole row on each side, rows of whole 16 bytes."""
    return len(x) <= ROWS and has_warpgroups(x) and program.available() and computes(x, weight)


def computes(x: Tensor, weight: Fp8Weight) -> bool:
    columns = weight.shape[1]
    return (
        weight.input is not None
        and weight.input.group is None
        and weight.columns >= columns
        and columns % 16 == 0
        and weight.codes.is_contiguous()
        and weight.codes.data_ptr() % 16 == 0
        and x.dtype in (torch.bfloat16, torch.float16)
    )


def fp8_linear(
    codes: Tensor,
    scale: Tensor,
    weight: Fp8Weight,
    bias: Tensor | None,
    dtype: torch.dtype,
    tile: RowsTile | None = None,
) -> Tensor:
    """codes [T, K] and scale [T, 1], T at most ROWS, as `fp8_linear.quantise_rows` gives them
    -> [T, N] of dtype."""
    (num_rows, columns), num_outs = codes.shape, weight.shape[0]
    assert num_rows <= ROWS
    out = torch.empty((num_rows, num_outs), dtype=dtype, device=codes.device)
    tile = tile or tile_for(num_outs, columns)
    defines = (
        ("TYPE", 0 if dtype == torch.bfloat16 else 1),
        ("SLOTS", tile.slots),
        ("CLUSTER", tile.splits),
        ("BIAS", int(bias is not None)),
    )
    shared, device = tile.shared_bytes, codes.device.index or 0
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
        ),
    )
    return out
