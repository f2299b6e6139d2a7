"""Which CUDA kernel multiplies with a weight of 4 bits, and the shapes of its blocks.

Up to few_rows() rows a kernel whose warps share the depth, beyond it one whose warps share the
outputs (int_linear_cuda.py). Chosen by benchmarks/kernels/int4_rows.py on an H200, at layers of an
8B with groups of 128; sizes that were not measured follow the nearest of those that were.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import ClassVar

from specengine.kernels.dispatch import MOST_SHARED
from specengine.kernels.linear.quantised import IntWeight

STAGE = 128  # columns that a warp takes at a time
FEW_ROWS = 16  # up to which the kernel for few rows is the faster, whatever the weight
EXACT_ROWS = 128  # up to which both kernels scale sums in float32, and a row has the bits of few
ROUNDED_ROWS = (
    256  # up to which weights rounded in registers beat dequantised ones, of many outputs
)
MANY_OUTS = 16384

_PROCESSORS = 132  # of an H100 or H200
_FULL = 128  # blocks of 128 outputs that nearly fill the 132 multiprocessors of an H100 or H200
_DEEP = 8192  # columns


@dataclass(frozen=True)
class FewTile:
    """Shape of a block of the kernel for few rows: outputs (in sixteens), warps that share the
    depth, stages of a warp whose codes are on their way, whether x is loaded a stage ahead, and
    parts of neighbouring warps, whose sums are added first."""

    sixteens: int
    warps: int
    slots: int
    ahead: bool = False
    parts: int = 1
    kernel: ClassVar[str] = "int4_rows"

    def __str__(self) -> str:
        words = " ahead" * self.ahead + (f" {self.parts} parts" if self.parts > 1 else "")
        return f"few {self.outs} outs {self.warps} warps {self.slots} slots{words}"

    @property
    def defines(self) -> dict[str, int]:
        return {"AHEAD": int(self.ahead), "PARTS": self.parts}

    @property
    def outs(self) -> int:
        return 16 * self.sixteens

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def eights_of(self, num_rows: int) -> int:
        """Rows of a block, in eights."""
        return 1 if num_rows <= 8 else 2

    def grid(self, num_outs: int, num_rows: int) -> tuple[int, int, int]:
        return -(-num_outs // self.outs), -(-num_rows // (8 * self.eights_of(num_rows))), 1

    def shared_bytes(self, weight: IntWeight, eights: int) -> int:
        """A ring of codes, over which sums are written, and scales and zeros."""
        groups = weight.shape[1] // weight.group
        ring = 1024 * self.sixteens * self.slots * self.warps
        zero = 0 if weight.zero is None else weight.zero.element_size()
        sizes = (weight.scale.element_size(), zero)
        places = sum(-(-self.outs * groups * size // 16) * 16 for size in sizes)
        return max(ring + places, 4 * self.warps * 8 * eights * (self.outs + 4))


@dataclass(frozen=True)
class WideTile:
    """Shape of a block of the kernel for dozens and hundreds of rows, which multiplies by four
    warps together: warps of 16 outputs that multiply, rows (in eights) at most, ways (the warps of
    the kernel for few rows), blocks that share them (its parts), stages in shared memory, and
    whether weights are rounded to half precision before they are multiplied."""

    warps: int
    most_eights: int
    ways: int
    blocks: int
    slots: int
    rounded: bool = False
    sixteens: ClassVar[int] = 1
    kernel: ClassVar[str] = "int4_wgmma"

    def __str__(self) -> str:
        tile = f"{self.outs} outs {8 * self.most_eights} rows {self.ways} ways {self.blocks} blocks"
        return f"wide {tile} {self.slots} slots{' rounded' * self.rounded}"

    @property
    def defines(self) -> dict[str, int]:
        return {"WAYS": self.ways, "CLUSTER": self.blocks, "ROUNDED": int(self.rounded)}

    @property
    def outs(self) -> int:
        return 16 * self.warps

    @property
    def threads(self) -> int:
        """Four warps more copy, and show what has landed."""
        return 32 * (self.warps + 4)

    def eights_of(self, num_rows: int) -> int:
        """Rows of a block, in eights."""
        return next(n for n in (1, 2, 4, 8, 16) if 8 * n >= num_rows or n == self.most_eights)

    def grid(self, num_outs: int, num_rows: int) -> tuple[int, int, int]:
        """Blocks of all rows beside each other: they read the same codes."""
        rows = 8 * self.eights_of(num_rows)
        return self.blocks * -(-num_rows // rows), -(-num_outs // self.outs), 1

    def shared_bytes(self, weight: IntWeight, eights: int) -> int:
        """A ring of rows and codes, over which sums are written, barriers, sums of ways, and the
        scales and zeros of all stages of a block."""
        rows = 8 * eights
        ring = self.slots * (2 * rows * STAGE + 64 * self.outs)
        ways = self.ways // self.blocks
        of_ways = 0 if self.rounded or ways == 1 else 4 * rows * self.outs
        stages = sum(len(range(way, weight.shape[1] // STAGE, self.ways)) for way in range(ways))
        words = 2 if weight.scale.element_size() == 4 else 1
        return max(
            ring + 256 + of_ways + 4 * words * stages * self.outs, 4 * rows * (self.outs + 4)
        )


Tile = FewTile | WideTile


def ways_of(num_outs: int, columns: int) -> int:
    """In how many the depth is shared. Ways and parts decide the order of a row's sum, and depend
    on the weight alone, never on the rows at hand."""
    return 16 if columns > 4096 or (columns >= 2048 and num_outs <= 4096) else 8


def parts_of(num_outs: int, columns: int) -> int:
    """Of neighbouring ways, whose sums are added first: the blocks that share the depth in the
    kernel for dozens of rows. As few as fill the card, and twice as many of a deep weight."""
    parts = next((n for n in (1, 2, 4) if n * -(-num_outs // 128) >= _FULL), 8)
    return min(8, 2 * parts if columns > _DEEP else parts)


def most_rows(num_outs: int) -> int:
    """Of the kernel for dozens of rows; with more, dequantising the whole weight costs less."""
    return ROUNDED_ROWS if num_outs >= MANY_OUTS else EXACT_ROWS


def few_rows(num_outs: int, columns: int) -> int:
    """Up to which the kernel for few rows is the faster: FEW_ROWS, twice as many of a deep weight
    of few outputs (and no deeper than its scales fit in shared memory)."""
    is_deep = num_outs <= 4096 and _DEEP < columns <= 4 * _DEEP
    return 2 * FEW_ROWS if is_deep else FEW_ROWS


def few_tile(num_outs: int, columns: int, num_rows: int) -> FewTile:
    """x is loaded ahead where a warp takes 4 stages or more and registers suffice: up to 8 rows, or
    16 warps of 32 outputs."""
    is_wide = num_rows > FEW_ROWS or (num_outs >= MANY_OUTS and num_rows > 8)
    ways = ways_of(num_outs, columns)
    ahead = columns >= 4 * STAGE * ways and (num_rows <= 8 or (ways == 16 and not is_wide))
    parts = parts_of(num_outs, columns)
    if is_wide:
        return FewTile(4, ways, 2, ahead, parts)
    return FewTile(2, ways, 2 if num_outs >= 4096 else 4, ahead, parts)


def wide_tile(weight: IntWeight, num_rows: int) -> WideTile:
    """Blocks of as many outputs as keep the multiprocessors busy for the shortest, with as many
    stages as fit in shared memory."""
    num_outs, columns = weight.shape
    ways, parts = ways_of(num_outs, columns), parts_of(num_outs, columns)
    rounded = num_rows > EXACT_ROWS
    most = 16 if rounded else 8 if num_rows > 32 else 4

    def busy(warps: int) -> int:
        tile = WideTile(warps, most, ways, parts, 4)
        across, down, _ = tile.grid(num_outs, num_rows)
        return -(-across * down // _PROCESSORS) * warps

    widths = (8,) if rounded else sorted((16, 12, 8), key=busy)
    tiles = (
        WideTile(warps, most, ways, parts, slots, rounded)
        for warps, slots in product((*widths, 4), (6, 5, 4, 3))
    )
    return next(
        tile for tile in tiles if tile.shared_bytes(weight, tile.eights_of(num_rows)) <= MOST_SHARED
    )
