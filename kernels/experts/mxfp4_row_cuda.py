"""Shapes of the kernel that multiplies few rows' experts in MXFP4 each by itself: what
mxfp4_cuda.Tile is of the kernel for all numbers of rows. Bits are the same."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specengine.kernels.dispatch import MOST_SHARED, multiprocessors
from specengine.kernels.experts.mxfp4_product import Product
from specengine.kernels.linear.mxfp4_words import CHUNK

_PART_BYTES = 1024 + 64  # of 16 rows of a chunk
_MOST_SLOTS, _MOST_THREADS, _MOST_TEAMS = 32, 1024, 15


@dataclass(frozen=True)
class RowTile:
    """Shape of a block: teams of warps with a tile of 16 rows of the weight each, of the first
    product 16 of gate and 16 of up; chunks that a warp fetches at once, and how many times it has
    these on their way; whether the second product asks for more than that before it may begin.
    parts: of the columns, whose sums are added; the tile of other rows has as many, and is else
    not the order of a sum. spread: warps that share the parts of 16 rows."""

    teams: int
    step: int
    stages: int
    is_ahead: bool = False
    parts: int = 1
    spread: int = 1

    name = "mxfp4_row"

    def __str__(self) -> str:
        ahead = "+" if self.is_ahead else ""
        return f"{self.teams}/{self.step}/{self.stages}{ahead}/{self.parts}/{self.spread}"

    def threads_of(self, product: Product) -> int:
        return 32 * self._warps(product)

    def fits(self, product: Product) -> bool:
        """Whether tiles divide the outputs, and halves of a chunk the columns, shared memory
        suffices on a card of any size, and a lane can have a slot."""
        divides = product.width % 16 + product.columns % (CHUNK // 2) == 0
        return (
            divides
            and product.num_slots <= _MOST_SLOTS
            and self.teams <= _MOST_TEAMS
            and self.threads_of(product) <= _MOST_THREADS
            and self.parts % self.spread == 0
            and self.parts <= self._chunks(product)
            and self.shared_bytes(product) <= MOST_SHARED
        )

    def defines(self, product: Product) -> tuple[tuple[str, int], ...]:
        return (
            ("TEAMS", self.teams),
            ("PARTS", self.parts),
            ("SPREAD", self.spread),
            ("STEP", self.step),
            ("STAGES", self.stages),
            ("AHEAD", int(self.is_ahead)),
            ("TOGETHER", 1),
        )

    def grid(self, product: Product, device: torch.device) -> tuple[int, int, int]:
        """All blocks run at once, and each has a tile."""
        return min(multiprocessors(device), self._tiles(product)), 1, 1

    def shared_bytes(self, product: Product, blocks: int = 1) -> int:
        """Barriers, two sets of sums, rings of the weight, and the rows that a block may read."""
        warps = self._warps(product)
        barriers = -(-8 * (1 + self.teams + warps * self.stages) // 128) * 128
        sums = self.teams * 2 * self.parts * 64 * (1 if product.is_down else 2)
        rings = warps * self.stages * self.step * _PART_BYTES
        return barriers + sums + rings + self._rows(product, blocks) * self._chunks(product) * 256

    def _rows(self, product: Product, blocks: int) -> int:
        """That so many tiles one behind the other may read."""
        share = -(-self._tiles(product) // blocks)
        tiles = product.width // 16 * (1 if product.is_down else product.num_chosen)
        most = product.num_slots if product.is_down else product.num_rows
        return min(most, (share + tiles - 2) // tiles + 1)

    def _warps(self, product: Product) -> int:
        return self.teams * self.spread * (1 if product.is_down else 2)

    @staticmethod
    def _tiles(product: Product) -> int:
        return product.num_slots * (product.width // 16)

    @staticmethod
    def _chunks(product: Product) -> int:
        return -(-product.columns // CHUNK)
