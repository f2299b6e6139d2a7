"""The products of experts in MXFP4 in CUDA C++: weights stream through shared memory, those of the
second product before the first one has ended. One kernel for few rows, one for up to 16 an
expert on average."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from specengine.kernels.cuda import program
from specengine.kernels.cuda.program import Argument, compiled
from specengine.kernels.dispatch import (
    MOST_SHARED,
    has_dependent_launch,
    has_much_shared,
    multiprocessors,
)
from specengine.kernels.experts.packed import PackedExperts, PackedExpertWeights
from specengine.kernels.experts.types import ACTIVATIONS, Chosen
from specengine.kernels.linear.mxfp4_words import CHUNK, Mxfp4Words

MOST_HELD = 8  # rows of an expert that a block of few rows multiplies at once

_SOURCES = Path(__file__).parents[1] / "cuda"
_X_CHUNK, _X_PAD = 64, 16  # words
_PART_BYTES = 1024 + 64  # of 16 rows of a chunk
_X_STAGES, _X_PITCH = 3, 2 * 2 * CHUNK + 16  # steps of the rows, and bytes of a row of one
_BARRIER_BYTES = 128
MANY_FROM = (
    33  # rows of tiles for more; fewer are in tiles for few. A row's bits differ between both
)
_MEAN_ROWS = (4, 16)  # of an expert, at most: of few rows, and of more


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
class RowsTile:
    """Shape of a block for few rows: rows of the weight of a tile (in sixteens), warps that share
    the columns, chunks of a warp on their way, and tiles. Warps are the order of a sum."""

    name: ClassVar = "mxfp4_rows"
    sixteens: int
    warps: int
    stages: int
    tiles: int

    def __str__(self) -> str:
        return f"{self.sixteens}/{self.warps}/{self.stages}/{self.tiles}"

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def fits(self, product: Product) -> bool:
        """Whether shared memory holds rows one by one."""
        return self._bytes(1, product) <= MOST_SHARED

    def defines(self, product: Product) -> tuple[tuple[str, int], ...]:
        return (
            ("NT", self.sixteens),
            ("WARPS", self.warps),
            ("STAGES", self.stages),
            ("TILES", self.tiles),
            ("EVERY", int(product.num_slots > product.num_experts)),
        )

    def grid(self, product: Product, device: torch.device) -> tuple[int, int, int]:
        outs = product.outs(self.sixteens) * self.tiles
        return -(-product.width // outs), min(product.num_slots, product.num_experts), 1

    def shared_bytes(self, product: Product) -> int:
        return self._bytes(self.held_rows(product), product)

    def arguments(self, product: Product) -> tuple[Argument, ...]:
        return (self.held_rows(product),)

    def _bytes(self, held: int, product: Product) -> int:
        """A ring of the weight, rows of x, sums of two tiles, and an expert's slots."""
        ring = self.warps * self.stages * self.sixteens * _PART_BYTES
        inputs = held * (-(-product.columns // CHUNK) * _X_CHUNK + _X_PAD)
        sums = 2 * self.warps * MOST_HELD * (16 * self.sixteens + 4)
        return ring + 4 * (inputs + sums + product.num_rows)

    def held_rows(self, product: Product) -> int:
        """Rows of an expert that a block multiplies at once: twice their mean, so that few have
        more, where shared memory holds them."""
        most = 4 if product.num_slots <= 2 * product.num_experts else MOST_HELD
        held = min(product.num_rows, most)
        while held > 1 and self._bytes(held, product) > MOST_SHARED:
            held = -(-held // 2)
        return held


@dataclass(frozen=True)
class ManyTile:
    """Shape of a block for more rows: rows of the weight of a warp's tile (in sixteens, pairs of
    gate and up of the first product), warps, chunks of a warp on their way, eights of an expert's
    rows multiplied at once, and blocks of a multiprocessor. None of these is the order of a sum."""

    name: ClassVar = "mxfp4_many"
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

    def arguments(self, product: Product) -> tuple[Argument, ...]:
        return (product.num_experts,)

    @property
    def _x_stages(self) -> int:
        return 6 if self.eights == 1 else 3


# Least rows -> tile, the most first. Bits are the same in all of them.
MANY_TILES = (
    (5, ManyTile(2, 15, 3, 4)),
    (2, ManyTile(2, 15, 3, 1)),
    (1, ManyTile(1, 11, 7, 1)),
)


def tile_for(num_rows: int, num_chosen: int, num_experts: int) -> RowsTile | ManyTile | None:
    """As timed with GPT-OSS-20B on an H200 (`mxfp4-rows` of benchmarks/results). Of fewer rows than
    MANY_FROM tiles for few rows with eight warps, so that a row has the same bits in all, the
    fastest or up to 3% behind it; of more than two rows an expert narrower ones, two of which fit
    in a multiprocessor. None: Triton's kernel is faster."""
    mean = num_rows * num_chosen / num_experts
    if mean > _MEAN_ROWS[1]:
        return None
    if num_rows >= MANY_FROM or mean > _MEAN_ROWS[0]:
        return next(tile for least, tile in MANY_TILES if num_rows >= least)
    if mean > 2:
        return RowsTile(1, 8, 6, 8)
    return RowsTile(2, 8, 4, 4 if num_rows >= 4 else 2)


def takes(x: Tensor, chosen: Chosen, weights: PackedExpertWeights) -> bool:
    """Whether a kernel runs here, computes these products, and is the faster one."""
    runs = has_dependent_launch(x) and has_much_shared(x) and program.available()
    return runs and computes(x, chosen, weights)


def computes(x: Tensor, chosen: Chosen, weights: PackedExpertWeights) -> bool:
    """bfloat16, weights as they are arranged for the kernels, rows that are multiplied as they are,
    and shapes that the tile fits."""
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
        and all(
            one.width % 16 == 0 and tile.fits(one) for one in _products(x.shape[1], chosen, weights)
        )
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
    tile: RowsTile | ManyTile | None = None,
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
    tile: RowsTile | ManyTile,
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
    source = _SOURCES / f"{tile.name}.cu"
    kernel = compiled(source, tile.name, defines, MOST_SHARED, x.device.index or 0)
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
            *tile.arguments(product),
            how.alpha,
            how.limit,
        ),
    )
