"""The products of experts in MXFP4 in CUDA C++: weights stream through shared memory, those of the
second product before the first one has ended. One kernel for up to four rows (mxfp4_row_cuda), and
one for up to 16 an expert on average: a row has the same bits at every number of rows."""

from __future__ import annotations

from collections.abc import Sequence
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
from specengine.kernels.experts.mxfp4_product import Product
from specengine.kernels.experts.mxfp4_row_cuda import RowTile
from specengine.kernels.experts.packed import PackedExperts, PackedExpertWeights
from specengine.kernels.experts.types import ACTIVATIONS, Chosen
from specengine.kernels.linear.mxfp4_words import CHUNK, Mxfp4Words

_SOURCES = Path(__file__).parents[1] / "cuda"
_PART_BYTES = 1024 + 64  # of 16 rows of a chunk
_X_STAGES, _X_PITCH = 3, 2 * 2 * CHUNK + 16  # steps of the rows, and bytes of a row of one
_BARRIER_BYTES = 128
_MEAN_ROWS = 16  # of an expert, at most


@dataclass(frozen=True)
class Tile:
    """Shape of a block: warps, whose tiles have 32 rows of the weight each, of the first product
    16 of gate and 16 of up, chunks of a warp on their way, and eights of an expert's rows
    multiplied at once. None of these is the order of a sum."""

    warps: int
    stages: int
    eights: int

    name = "mxfp4_experts"

    def __str__(self) -> str:
        return f"{self.warps}/{self.stages}/{self.eights}"

    def threads_of(self, _: Product) -> int:
        """A warp more fetches rows."""
        return 32 * (self.warps + 1)

    def fits(self, product: Product) -> bool:
        """Whether tiles divide the outputs, and halves of a chunk the columns, and shared memory
        suffices."""
        divides = product.width % _outs(product) + product.columns % (CHUNK // 2) == 0
        return divides and self.shared_bytes(product) <= MOST_SHARED

    def defines(self, _: Product) -> tuple[tuple[str, int], ...]:
        return (
            ("WARPS", self.warps),
            ("STAGES", self.stages),
            ("PASS", self.eights),
            ("X_STAGES", self._x_stages),
        )

    def grid(self, product: Product, device: torch.device) -> tuple[int, int, int]:
        """All blocks run at once, and each has a tile, if no two rows choose the same expert."""
        chosen = min(product.num_slots, product.num_experts)
        return min(multiprocessors(device), chosen * (product.width // _outs(product))), 1, 1

    def shared_bytes(self, product: Product, blocks: int = 1) -> int:
        """Barriers, steps of the rows, rings of the weight, sums of half of the columns, and which
        slots experts have; of any number of blocks."""
        rows = self._x_stages * 8 * self.eights * _X_PITCH
        of_warp = self.stages * 2 * _PART_BYTES + self.eights * 1024
        counted = 8 * (product.num_experts + product.num_slots)
        return _BARRIER_BYTES + rows + self.warps * of_warp + counted

    @property
    def _x_stages(self) -> int:
        return 6 if self.eights == 1 else 3


def _outs(product: Product) -> int:
    """Outputs of a tile."""
    return 32 if product.is_down else 16


AnyTile = Tile | RowTile
# Least rows -> tile, the most first, behind that of few rows. Bits are the same in all of them.
TILES = ((17, Tile(15, 3, 4)), (1, Tile(15, 3, 1)))
FEW_ROWS = 4


def tile_for(
    num_rows: int, num_chosen: int, num_experts: int, products: Sequence[Product] = ()
) -> AnyTile | None:
    """As timed with GPT-OSS on an H200 (`mxfp4-rows` of benchmarks/results), if it fits these
    products. None: too many rows an expert, or none fits, Triton computes."""
    if num_rows * num_chosen > _MEAN_ROWS * num_experts:
        return None
    tiles: list[AnyTile] = [RowTile()] if num_rows <= FEW_ROWS else []
    tiles += [tile for least, tile in TILES if num_rows >= least]
    return next((tile for tile in tiles if all(tile.fits(one) for one in products)), None)


def takes(x: Tensor, num_chosen: int, weights: PackedExpertWeights) -> bool:
    """Whether the kernel runs here and computes these products."""
    runs = has_dependent_launch(x) and has_much_shared(x) and program.available()
    return runs and computes(x, num_chosen, weights)


def computes(x: Tensor, num_chosen: int, weights: PackedExpertWeights) -> bool:
    """Rows of bfloat16 that are multiplied as they are, at least one and at most 16 of an expert on
    average; weights as they are arranged for the kernel, and shapes that the tile fits."""
    both = weights.gate_up, weights.down
    products = _products(x, num_chosen, weights)
    tensors = [one for one in (weights.gate_up_bias, weights.down_bias) if one is not None]
    return (
        len(x) > 0
        and not weights.weighs_input
        and weights.activation.name in ACTIVATIONS
        and all(isinstance(one.first, Mxfp4Words) and one.input is None for one in both)
        and all(one.dtype == torch.bfloat16 and one.is_contiguous() for one in (x, *tensors))
        and x.data_ptr() % 16 == 0
        and tile_for(len(x), num_chosen, weights.num_experts, products) is not None
    )


def _products(x: Tensor, count: int, weights: PackedExpertWeights) -> tuple[Product, Product]:
    (rows, hidden), num_experts, inner = x.shape, weights.num_experts, weights.inner
    return (
        Product(rows, count, num_experts, hidden, inner, is_down=False),
        Product(rows, count, num_experts, inner, hidden, is_down=True),
    )


def experts(
    x: Tensor,
    chosen: Chosen,
    weights: PackedExpertWeights,
    tile: AnyTile | None = None,
    into: Tensor | None = None,
) -> Tensor:
    """What each chosen expert gives of each row, as experts.experts says: [T, H] that `takes` took
    -> float32 [K, T, H], the first of `into` if given. tile: in place of that of `tile_for`."""
    (num_rows, count), inner = chosen.ids_TK.shape, weights.inner
    gate_up, down = products = _products(x, count, weights)
    tile = tile or tile_for(num_rows, count, weights.num_experts, products)
    assert tile is not None, "not what `takes` allows"
    activated = torch.empty(num_rows * count, inner, dtype=x.dtype, device=x.device)
    if into is None:
        into = torch.empty(count, *x.shape, dtype=torch.float32, device=x.device)
    parts = into[:count]
    _launch(tile, gate_up, x, weights.gate_up, weights.gate_up_bias, chosen, weights, activated)
    _launch(tile, down, activated, weights.down, weights.down_bias, chosen, weights, parts)
    return parts


def _launch(
    tile: AnyTile,
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
    grid = tile.grid(product, x.device)
    kernel.launch(
        grid,
        tile.threads_of(product),
        tile.shared_bytes(product, grid[0]),
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
