"""The products of experts in MXFP4 in CUDA C++: weights stream through shared memory, those of the
second product before the first one has ended. One kernel for all rows, up to 16 an expert on
average: a row has the same bits at every number of rows that it takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specengine.kernels.cuda import program
from specengine.kernels.cuda.program import compiled
from specengine.kernels.dispatch import (
    MOST_SHARED,
    has_dependent_launch,
    has_much_shared,
    multiprocessors,
)
from specengine.kernels.experts.packed import PackedExperts, PackedExpertWeights
from specengine.kernels.experts.types import ACTIVATIONS, Chosen
from specengine.kernels.linear.mxfp4_words import CHUNK, Mxfp4Words

_NAME = "mxfp4_experts"
_SOURCE = Path(__file__).parents[1] / "cuda" / f"{_NAME}.cu"
_PART_BYTES = 1024 + 64  # of 16 rows of a chunk
_X_STAGES, _X_PITCH = 3, 2 * 2 * CHUNK + 16  # steps of the rows, and bytes of a row of one
_BARRIER_BYTES = 128
_MEAN_ROWS = 16  # of an expert, at most


@dataclass(frozen=True)
class Product:
    """Shapes of one of the two products. width: outputs of an expert, or of its gate."""

    num_rows: int
    num_chosen: int
    num_experts: int
    columns: int
    width: int
    is_down: bool

    @property
    def num_slots(self) -> int:
        return self.num_rows * self.num_chosen

    def outs(self, sixteens: int) -> int:
        """Outputs of so many sixteens of rows of the weight, a half of which may be of up."""
        return sixteens * (16 if self.is_down else 8)


@dataclass(frozen=True)
class Tile:
    """Shape of a block: rows of the weight of a warp's tile (in sixteens, of the first product
    halves or pairs of gate and up), warps, chunks of a warp on their way, eights of an expert's
    rows multiplied at once, and blocks of a multiprocessor. None of these is the order of a sum."""

    sixteens: int
    warps: int
    stages: int
    eights: int
    together: int = 1

    def __str__(self) -> str:
        return f"{self.sixteens}/{self.warps}/{self.stages}/{self.eights}/{self.together}"

    @property
    def threads(self) -> int:
        """A warp more fetches rows."""
        return 32 * (self.warps + 1)

    def fits(self, product: Product) -> bool:
        """Whether tiles divide the outputs, and halves of a chunk the columns, and shared memory
        suffices."""
        divides = product.width % product.outs(self.sixteens) + product.columns % (CHUNK // 2) == 0
        return divides and self.shared_bytes(product) * self.together <= MOST_SHARED

    def defines(self, product: Product) -> tuple[tuple[str, int], ...]:
        return (
            ("NT", self.sixteens),
            ("WARPS", self.warps),
            ("STAGES", self.stages),
            ("PASS", self.eights),
            ("X_STAGES", self._x_stages),
            ("TOGETHER", self.together),
        )

    def grid(self, product: Product, device: torch.device) -> tuple[int, int, int]:
        """All blocks run at once, and each has a tile, if no two rows choose the same expert."""
        chosen = min(product.num_slots, product.num_experts)
        tiles = chosen * (product.width // product.outs(self.sixteens))
        return min(multiprocessors(device) * self.together, tiles), 1, 1

    def shared_bytes(self, product: Product) -> int:
        """Barriers, steps of the rows, rings of the weight, and which slots experts have."""
        rows = self._x_stages * 8 * self.eights * _X_PITCH
        rings = self.warps * self.stages * self.sixteens * _PART_BYTES
        return _BARRIER_BYTES + rows + rings + 8 * (product.num_experts + product.num_slots)

    @property
    def _x_stages(self) -> int:
        return 6 if self.eights == 1 else 3


# Least rows -> tile, the most first. Bits are the same in all of them.
TILES = (
    (17, Tile(2, 15, 3, 4)),
    (3, Tile(2, 15, 3, 1)),
    (1, Tile(1, 11, 7, 1)),
)


def tile_for(num_rows: int, num_chosen: int, num_experts: int) -> Tile | None:
    """As timed with GPT-OSS on an H200 (`mxfp4-rows` of benchmarks/results). None: too many rows an
    expert, Triton computes."""
    if num_rows * num_chosen > _MEAN_ROWS * num_experts:
        return None
    return next(tile for least, tile in TILES if num_rows >= least)


def takes(x: Tensor, chosen: Chosen, weights: PackedExpertWeights) -> bool:
    """Whether the kernel runs here and computes these products."""
    runs = has_dependent_launch(x) and has_much_shared(x) and program.available()
    return runs and computes(x, chosen, weights)


def computes(x: Tensor, chosen: Chosen, weights: PackedExpertWeights) -> bool:
    """bfloat16, weights as they are arranged for the kernel, rows that are multiplied as they are,
    at most 16 of an expert on average, and shapes that the tile fits."""
    both = weights.gate_up, weights.down
    num_rows, count = chosen.ids_TK.shape
    tile = tile_for(num_rows, count, weights.num_experts)
    tensors = [one for one in (weights.gate_up_bias, weights.down_bias) if one is not None]
    return (
        tile is not None
        and not weights.weighs_input
        and weights.activation.name in ACTIVATIONS
        and all(isinstance(one.first, Mxfp4Words) and one.input is None for one in both)
        and all(one.dtype == torch.bfloat16 and one.is_contiguous() for one in (x, *tensors))
        and x.data_ptr() % 16 == 0
        and all(tile.fits(one) for one in _products(x.shape[1], chosen, weights))
    )


def _products(hidden: int, chosen: Chosen, weights: PackedExpertWeights) -> tuple[Product, Product]:
    (rows, count), num_experts, inner = chosen.ids_TK.shape, weights.num_experts, weights.inner
    return (
        Product(rows, count, num_experts, hidden, inner, is_down=False),
        Product(rows, count, num_experts, inner, hidden, is_down=True),
    )


def experts(
    x: Tensor,
    chosen: Chosen,
    weights: PackedExpertWeights,
    tile: Tile | None = None,
) -> Tensor:
    """What each chosen expert gives of each row, as experts.experts says: [T, H] that `takes` took
    -> float32 [K, T, H]. tile: in place of that of `tile_for`."""
    (num_rows, count), inner = chosen.ids_TK.shape, weights.inner
    tile = tile or tile_for(num_rows, count, weights.num_experts)
    assert tile is not None, "more rows than `takes` allows"
    activated = torch.empty(num_rows * count, inner, dtype=x.dtype, device=x.device)
    parts = torch.empty(count, *x.shape, dtype=torch.float32, device=x.device)
    gate_up, down = _products(x.shape[1], chosen, weights)
    _launch(tile, gate_up, x, weights.gate_up, weights.gate_up_bias, chosen, weights, activated)
    _launch(tile, down, activated, weights.down, weights.down_bias, chosen, weights, parts)
    return parts


def _launch(
    tile: Tile,
    product: Product,
    x: Tensor,
    matrix: PackedExperts,
    bias: Tensor | None,
    chosen: Chosen,
    weights: PackedExpertWeights,
    out: Tensor,
) -> None:
    how = weights.activation
    defines = (
        ("DOWN", int(product.is_down)),
        *tile.defines(product),
        ("CHOSEN", product.num_chosen),
        ("BIAS", int(bias is not None)),
        ("CLAMPED", int(how.name == "clamped")),
    )
    kernel = compiled(_SOURCE, _NAME, defines, MOST_SHARED, x.device.index or 0)
    kernel.launch(
        tile.grid(product, x.device),
        tile.threads,
        tile.shared_bytes(product),
        (
            x,
            matrix.tensors["words"],
            matrix.tensors["factor"],
            bias,
            chosen.ids_TK,
            chosen.weights_TK,
            out,
            product.num_slots,
            product.num_rows,
            product.columns,
            product.width,
            product.num_experts,
            how.alpha,
            how.limit,
        ),
    )
