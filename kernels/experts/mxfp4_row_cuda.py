"""How the kernel is launched that multiplies few rows' experts in MXFP4 each by itself: what
mxfp4_cuda.Tile is of the kernel for all numbers of rows. Bits are the same."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specengine.kernels.dispatch import MOST_SHARED, multiprocessors
from specengine.kernels.experts.mxfp4_product import Product
from specengine.kernels.linear.mxfp4_words import CHUNK

_PART_BYTES = 1024 + 64  # of 16 rows of a chunk
_MOST_SLOTS = 32
_TEAMS = 6


@dataclass(frozen=True)
class RowTile:
    """A block has six teams of warps, each with a tile of 16 rows of the weight, of the first
    product 16 of gate and 16 of up. Two warps share the columns of 16 rows. As timed with GPT-OSS
    on an H200."""

    name = "mxfp4_row"

    def __str__(self) -> str:
        return "few rows"

    def threads_of(self, product: Product) -> int:
        return 32 * _warps(product)

    def fits(self, product: Product) -> bool:
        """Whether tiles divide the outputs, and halves of a chunk the columns, of which each warp
        has some, shared memory suffices on a card of any size, and a lane can have a slot."""
        return (
            product.width % 16 + product.columns % (CHUNK // 2) == 0
            and product.columns > CHUNK
            and product.num_slots <= _MOST_SLOTS
            and self.shared_bytes(product) <= MOST_SHARED
        )

    def defines(self, product: Product) -> tuple[tuple[str, int], ...]:
        """Teams, chunks that a warp fetches at once, and how many times it has these on their
        way."""
        step, stages = _fetched(product)
        return ("TEAMS", _TEAMS), ("STEP", step), ("STAGES", stages)

    def grid(self, product: Product, device: torch.device) -> tuple[int, int, int]:
        """All blocks run at once, and each has a tile."""
        return min(multiprocessors(device), _tiles(product)), 1, 1

    def shared_bytes(self, product: Product, blocks: int = 1) -> int:
        """Barriers, two sets of sums, rings of the weight, and the rows that a block may read."""
        warps, (step, stages) = _warps(product), _fetched(product)
        barriers = -(-8 * (1 + _TEAMS + warps * stages) // 128) * 128
        of_warps = warps * (2 * 64 + stages * step * _PART_BYTES)
        return barriers + of_warps + _rows(product, blocks) * -(-product.columns // CHUNK) * 256


def _fetched(product: Product) -> tuple[int, int]:
    return (3, 3) if product.is_down else (2, 1)


def _warps(product: Product) -> int:
    return _TEAMS * 2 * (1 if product.is_down else 2)


def _tiles(product: Product) -> int:
    return product.num_slots * (product.width // 16)


def _rows(product: Product, blocks: int) -> int:
    """That so many tiles one behind the other may read."""
    share = -(-_tiles(product) // blocks)
    tiles = product.width // 16 * (1 if product.is_down else product.num_chosen)
    most = product.num_slots if product.is_down else product.num_rows
    return min(most, (share + tiles - 2) // tiles + 1)
