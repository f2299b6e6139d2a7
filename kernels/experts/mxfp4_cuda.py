"""The products of experts in MXFP4 for few rows in CUDA C++: weights stream through shared memory,
those of the second product before the first one has ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specengine.kernels.cuda import program
from specengine.kernels.cuda.program import compiled
from specengine.kernels.dispatch import MOST_SHARED, has_dependent_launch, has_much_shared
from specengine.kernels.experts.packed import PackedExperts, PackedExpertWeights
from specengine.kernels.experts.tiles import are_few
from specengine.kernels.experts.types import ACTIVATIONS, Chosen
from specengine.kernels.linear.mxfp4_words import CHUNK, Mxfp4Words

MOST_HELD = 8  # rows of an expert that a block multiplies at once

_SOURCE = Path(__file__).parents[1] / "cuda" / "mxfp4_rows.cu"
_X_CHUNK, _X_PAD = 64, 16  # words
_PART_BYTES = 1024 + 64  # of 16 rows of a chunk


@dataclass(frozen=True)
class RowsTile:
    """Shape of a block: rows of the weight of a tile (in sixteens), warps that share the columns,
    chunks of a warp on their way, and tiles. Warps are the order of a sum."""

    sixteens: int
    warps: int
    stages: int
    tiles: int

    def __str__(self) -> str:
        return f"{self.sixteens}/{self.warps}/{self.stages}/{self.tiles}"

    def shared_bytes(self, held: int, columns: int, num_rows: int) -> int:
        """A ring of the weight, rows of x, sums of two tiles, and an expert's slots."""
        ring = self.warps * self.stages * self.sixteens * _PART_BYTES
        inputs = held * (-(-columns // CHUNK) * _X_CHUNK + _X_PAD)
        sums = 2 * self.warps * MOST_HELD * (16 * self.sixteens + 4)
        return ring + 4 * (inputs + sums + num_rows)

    def held_rows(self, num_rows: int, num_chosen: int, num_experts: int, columns: int) -> int:
        """Rows of an expert that a block multiplies at once: twice their mean, so that few have
        more, where shared memory holds them."""
        held = min(num_rows, 4 if num_rows * num_chosen <= 2 * num_experts else MOST_HELD)
        while held > 1 and self.shared_bytes(held, columns, num_rows) > MOST_SHARED:
            held = -(-held // 2)
        return held


def tile_for(num_rows: int, num_chosen: int, num_experts: int) -> RowsTile | None:
    """As timed with GPT-OSS-20B on an H200 (`mxfp4-few-rows` of benchmarks/results): of tiles with
    eight warps, so that a row has the same bits in all, the fastest or up to 3% behind it. Of more
    than two rows an expert narrower ones, two of which fit in a multiprocessor. None: Triton's
    kernel is faster."""
    mean = num_rows * num_chosen / num_experts
    if mean > 4:
        return None
    if mean > 2:
        return RowsTile(1, 8, 6, 8)
    return RowsTile(2, 8, 4, 4 if num_rows >= 4 else 2)


def takes(x: Tensor, chosen: Chosen, weights: PackedExpertWeights) -> bool:
    """Whether the kernel runs here, computes these products, and is the faster one."""
    runs = has_dependent_launch(x) and has_much_shared(x) and program.available()
    return runs and computes(x, chosen, weights)


def computes(x: Tensor, chosen: Chosen, weights: PackedExpertWeights) -> bool:
    """bfloat16, weights as they are arranged for the kernel, rows that are multiplied as they are,
    are few, and fit in shared memory one by one."""
    both = weights.gate_up, weights.down
    num_rows, count = chosen.ids_TK.shape
    tile = tile_for(num_rows, count, weights.num_experts)
    tensors = [one for one in (weights.gate_up_bias, weights.down_bias) if one is not None]
    return (
        tile is not None
        and are_few(num_rows, count)
        and not weights.weighs_input
        and weights.activation.name in ACTIVATIONS
        and all(isinstance(one.first, Mxfp4Words) and one.input is None for one in both)
        and all(one.dtype == torch.bfloat16 and one.is_contiguous() for one in (x, *tensors))
        and x.data_ptr() % 16 == 0
        and all(
            width % 16 == 0 and tile.shared_bytes(1, width, num_rows) <= MOST_SHARED
            for width in (x.shape[1], weights.inner)
        )
    )


def experts(
    x: Tensor, chosen: Chosen, weights: PackedExpertWeights, tile: RowsTile | None = None
) -> Tensor:
    """What each chosen expert gives of each row, as experts.experts says: [T, H] that `takes` took
    -> float32 [K, T, H]. tile: in place of that of `tile_for`."""
    (num_rows, count), inner = chosen.ids_TK.shape, weights.inner
    tile = tile or tile_for(num_rows, count, weights.num_experts)
    assert tile is not None, "more rows than `takes` allows"
    activated = torch.empty(num_rows * count, inner, dtype=x.dtype, device=x.device)
    parts = torch.empty(count, *x.shape, dtype=torch.float32, device=x.device)
    for given, matrix, bias, out, width in (
        (x, weights.gate_up, weights.gate_up_bias, activated, inner),
        (activated, weights.down, weights.down_bias, parts, x.shape[1]),
    ):
        _launch(given, chosen, weights, matrix, bias, out, width, tile)
    return parts


def _launch(
    x: Tensor,
    chosen: Chosen,
    weights: PackedExpertWeights,
    matrix: PackedExperts,
    bias: Tensor | None,
    out: Tensor,
    width: int,
    tile: RowsTile,
) -> None:
    is_down, how = matrix is weights.down, weights.activation
    num_rows, count = chosen.ids_TK.shape
    num_slots, num_experts, columns = num_rows * count, weights.num_experts, x.shape[1]
    held = tile.held_rows(num_rows, count, num_experts, columns)
    defines = (
        ("DOWN", int(is_down)),
        ("NT", tile.sixteens),
        ("WARPS", tile.warps),
        ("STAGES", tile.stages),
        ("TILES", tile.tiles),
        ("CHOSEN", count),
        ("EVERY", int(num_slots > num_experts)),
        ("BIAS", int(bias is not None)),
        ("CLAMPED", int(how.name == "clamped")),
    )
    outs = (16 if is_down else 8) * tile.sixteens * tile.tiles
    kernel = compiled(_SOURCE, "mxfp4_rows", defines, MOST_SHARED, x.device.index or 0)
    kernel.launch(
        (-(-width // outs), min(num_slots, num_experts), 1),
        32 * tile.warps,
        tile.shared_bytes(held, columns, num_rows),
        (
            x,
            matrix.tensors["words"],
            matrix.tensors["factor"],
            bias,
            chosen.ids_TK,
            chosen.weights_TK,
            out,
            num_slots,
            num_rows,
            columns,
            width,
            held,
            how.alpha,
            how.limit,
        ),
    )
