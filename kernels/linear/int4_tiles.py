"""Which CUDA kernel multiplies with a weight of 4 bits, and the shapes of its blocks.

Up to few_rows() rows a kernel whose warps share the depth, beyond it one whose warps share the
outputs (int_linear_cuda.py). Chosen by benchmarks/kernels/int4_rows.py on an H200, at layers of an
8B with groups of 128; sizes that were not measured follow the nearest of those that were.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import ClassVar

from specengine.kernels.dispatch import MOST_SHARED
from specengine.kernels.linear.quantised import IntWeight

STAGE = 128  # columns that a warp takes at a time
FEW_ROWS = 16  # of the kernel for few rows, where that for dozens does not compute
EXACT_ROWS = 128  # up to which both kernels scale sums in float32, and a row has the bits of few
ROUNDED_ROWS = 256  # up to which many weights rounded in registers beat dequantised ones
MANY_WEIGHTS = 1 << 25
MANY_OUTS = 16384
MANY_DEEP_OUTS = 8192

_PROCESSORS = 132  # of an H100 or H200
_IN_CLUSTERS = 120  # of them that clusters of four or eight blocks fill: 128 blocks do not fit
_FULL = 128  # blocks of 128 outputs that nearly fill the 132 multiprocessors of an H100 or H200
_DEEP = 8192  # columns
# What a stage of a block takes beside its products, in outputs times rows (in eights): widening the
# codes of an output, copying eight rows; and what the smallest stage takes, which waits for copies.
_TO_WIDEN, _TO_COPY, _LEAST = 8, 80, 1400


@dataclass(frozen=True)
class FewTile:
    """Shape of a block of the kernel for few rows: outputs (in sixteens), warps that share the
    depth, stages of a warp whose codes are on their way, whether x is loaded a stage ahead, and
    parts of neighbouring warps, whose sums are added first, then those of two parts."""

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
    warps together: warps of 16 outputs that multiply, rows (in eights) at most, ways and parts (the
    warps of the kernel for few rows, and its parts), blocks that share the depth (of one or two
    parts), stages in shared memory, and whether weights are rounded to half precision before they
    are multiplied."""

    warps: int
    most_eights: int
    ways: int
    parts: int
    blocks: int
    slots: int
    rounded: bool = False
    sixteens: ClassVar[int] = 1
    kernel: ClassVar[str] = "int4_wgmma"

    def __str__(self) -> str:
        tile = f"{self.outs} outs {8 * self.most_eights} rows {self.ways} ways {self.parts} parts"
        return f"wide {tile} {self.blocks} blocks {self.slots} slots{' rounded' * self.rounded}"

    @property
    def defines(self) -> dict[str, int]:
        return {
            "WAYS": self.ways,
            "PARTS": self.parts,
            "CLUSTER": self.blocks,
            "ROUNDED": int(self.rounded),
        }

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

    def stages(self, columns: int) -> int:
        """Of a block, of which the first has the most."""
        ways = range(self.ways // self.blocks)
        return sum(len(range(way, columns // STAGE, self.ways)) for way in ways)

    def shared_bytes(self, weight: IntWeight, eights: int) -> int:
        return self.shared_by(weight.shape[1], weight.scale.element_size(), eights)

    def shared_by(self, columns: int, scale_bytes: int, eights: int) -> int:
        """A ring of rows and codes, over which sums are written, barriers, sums of ways, and the
        scales and zeros of all stages of a block."""
        rows = 8 * eights
        ring = self.slots * (2 * rows * STAGE + 64 * self.outs)
        sums = 0 if self.rounded else self.parts // self.blocks - (self.ways == self.parts)
        scales = (2 if scale_bytes == 4 else 1) * self.stages(columns) * self.outs
        return max(ring + 256 + 4 * (sums * rows * self.outs + scales), 4 * rows * (self.outs + 4))


Tile = FewTile | WideTile


def ways_of(num_outs: int, columns: int) -> int:
    """In how many the depth is shared. Ways and parts decide the order of a row's sum, and depend
    on the weight alone, never on the rows at hand."""
    return 16 if columns > 4096 or (columns >= 2048 and num_outs <= 4096) else 8


def parts_of(num_outs: int, columns: int) -> int:
    """Of neighbouring ways, whose sums are added first, then those of two neighbouring parts: as
    many blocks share the depth in the kernel for dozens of rows, or half as many, each of two
    parts. As few as fill the card, and two of a deep weight, whose blocks have stages enough."""
    if columns > _DEEP:
        return 2
    return next((n for n in (1, 2, 4) if n * -(-num_outs // 128) >= _FULL), 8)


def blocks_of(parts: int) -> list[int]:
    """That may share the depth in the kernel for dozens of rows."""
    return sorted({parts, -(-parts // 2)}, reverse=True)


def most_rows(num_outs: int, columns: int) -> int:
    """Of the kernel for dozens of rows; with more, dequantising the whole weight costs less."""
    return ROUNDED_ROWS if num_outs * columns >= MANY_WEIGHTS else EXACT_ROWS


def few_rows(num_outs: int, columns: int) -> int:
    """Up to which the kernel for few rows is the faster: at 8 rows it takes 5% longer with many
    outputs and less with fewer; at 16 rows less with a deep weight of few outputs alone. With a
    deep weight of more outputs (14336 of 8192 columns) it takes a fifth longer from one row on."""
    if num_outs > MANY_DEEP_OUTS and ways_of(num_outs, columns) == 16:
        return 0
    if num_outs >= MANY_OUTS:
        return 6
    return FEW_ROWS if num_outs <= 4096 and columns > _DEEP else 8


def few_tile(num_outs: int, columns: int, num_rows: int) -> FewTile:
    """x is loaded ahead where a warp takes 4 stages or more and registers suffice: up to 8 rows, or
    16 warps of 32 outputs."""
    is_wide = num_outs >= MANY_OUTS and num_rows > 8
    ways = ways_of(num_outs, columns)
    ahead = columns >= 4 * STAGE * ways and (num_rows <= 8 or (ways == 16 and not is_wide))
    parts = parts_of(num_outs, columns)
    if is_wide:
        return FewTile(4, ways, 2, ahead, parts)
    return FewTile(2, ways, 2 if num_outs >= 4096 else 4, ahead, parts)


def wide_tile(weight: IntWeight, num_rows: int) -> WideTile:
    return _least_busy(*weight.shape, weight.scale.element_size(), num_rows)


@cache
def _least_busy(num_outs: int, columns: int, scale_bytes: int, num_rows: int) -> WideTile:
    """That whose blocks keep the multiprocessors busy for the shortest; of equals one of which two
    blocks are beside each other, then the first."""
    if num_rows > EXACT_ROWS:
        shapes = [(12, 16), (8, 16)]
    else:
        shapes = [(16, 8), (12, 8), (8, 8), (4, 8), *([(8, 16)] if num_rows > 64 else [])]
    ways, parts = ways_of(num_outs, columns), parts_of(num_outs, columns)
    rounded = num_rows > EXACT_ROWS
    found = []
    for (warps, most_eights), blocks, slots in product(shapes, blocks_of(parts), (8, 4, 3)):
        tile = WideTile(warps, most_eights, ways, parts, blocks, slots, rounded)
        eights = tile.eights_of(num_rows)
        shared = tile.shared_by(columns, scale_bytes, eights)
        if shared <= MOST_SHARED and (slots < 8 or warps == 4):
            at_once = _blocks_at_once(tile, shared, eights)
            across, down, _ = tile.grid(num_outs, num_rows)
            busy = _busy(tile, across * down, at_once, eights) * tile.stages(columns)
            found.append((busy, -at_once, tile))
    return min(found, key=lambda one: one[:2])[2]


def _blocks_at_once(tile: WideTile, shared: int, eights: int) -> int:
    """Of a multiprocessor, as int4_wgmma.cu shares its registers. Each block takes another KiB of
    shared memory."""
    fit = 2 * shared <= MOST_SHARED - 1024
    return 1 + int(fit and (tile.warps == 4 or (tile.warps == 8 and eights <= 8)))


def _busy(tile: WideTile, num_blocks: int, at_once: int, eights: int) -> int:
    """How long blocks of one stage keep a multiprocessor busy, in outputs times rows (in eights):
    codes are widened once whatever the rows, and rows are copied whatever the outputs. Blocks of a
    cluster come to a multiprocessor together even where others have none. A block that is alone
    there waits for its copies by itself."""
    processors = _IN_CLUSTERS if tile.blocks >= 4 else _PROCESSORS
    full, rest = divmod(num_blocks, at_once * processors)
    turns = full * at_once + -(-rest // processors)
    if tile.blocks > 1:
        turns = max(turns, at_once)
    of_stage = tile.outs * (eights + _TO_WIDEN) + _TO_COPY * eights
    return turns * max(of_stage, _LEAST // min(at_once, turns))
