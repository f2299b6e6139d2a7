"""Shapes of the blocks of the kernel for up to 8 rows with a weight of 4 bits and groups of 128.

Outputs and ways of a block were chosen on an H200 at layers of an 8B, among other products of a
layer, at 1 and 8 rows. How many slots are copied before the wait for the kernel ahead is reasoned
and not measured yet (benchmarks/kernels/int4_rows.py times none, one and all beside it).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

from specengine.kernels.dispatch import MOST_SHARED
from specengine.kernels.linear.int4_tiles import STAGE, few_rows, parts_of, ways_of
from specengine.kernels.linear.quantised import IntWeight

MOST_ROWS = 8
GROUP = 128
UNIT = 2048  # columns, of which a depth is a multiple: scales and zeros of a row are whole 16 bytes

_PROCESSORS = 132  # of an H100 or H200
_MOST_SIXTEENS = 14  # of a block
_MOST_WARPS = 16
_MOST_LINE = 4
_MOST_HELD = 1 << 16  # bytes of x
_EARLY = 1 << 16  # bytes of codes; x comes behind them


@dataclass(frozen=True)
class TurnTile:
    """Shape of a block of the kernel for up to 8 rows and groups of 128 (int4_turns.cu): rows at
    most (1, 2, 4 or 8), ways and parts (the warps of the kernel for few rows, and its parts), tiles
    of 16 outputs beside each other, neighbouring ways that a warp takes, stages of a slot, slots of
    a warp whose codes are on their way, and those copied while the kernel ahead may run."""

    rows: int
    ways: int
    parts: int
    side: int
    mine: int
    line: int
    slots: int
    early: int = 1
    sixteens: ClassVar[int] = 1  # of a warp
    kernel: ClassVar[str] = "int4_turns"

    def __str__(self) -> str:
        tile = f"{self.rows} rows {self.outs} outs {self.mine} ways a warp"
        return f"turns {tile} {self.slots} slots of {self.line} {self.early} early"

    @property
    def defines(self) -> dict[str, int]:
        names = {"ROWS": self.rows, "WAYS": self.ways, "PARTS": self.parts, "MINE": self.mine}
        return names | {"SIDE": self.side, "LINE": self.line, "EARLY": self.early}

    @property
    def outs(self) -> int:
        return 16 * self.side

    @property
    def warps(self) -> int:
        return self.ways // self.mine * self.side

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def eights_of(self, num_rows: int) -> int:
        return 1

    def grid(self, num_outs: int, num_rows: int) -> tuple[int, int, int]:
        return -(-num_outs // self.outs), 1, 1

    def shared_bytes(self, weight: IntWeight, eights: int) -> int:
        has_zero = weight.zero is not None
        return self.shared_by(weight.shape[1], weight.scale.element_size(), has_zero)

    def shared_by(self, columns: int, scale_bytes: int, has_zero: bool) -> int:
        """A ring of codes, over which many sums are written, few sums, scales and zeros, and x."""
        ring = 1024 * self.line * self.slots * self.warps
        sums = 4 * self.ways * self.rows * (self.outs + 4)
        sizes = [scale_bytes, *([1] if has_zero else [])]
        places = sum((columns // STAGE * size // 16 | 1) * 16 * self.outs for size in sizes)
        used = ring + sums if sums <= 8192 else max(ring, sums)
        return used + places + 2 * self.rows * columns


def turn_tile(weight: IntWeight, num_rows: int) -> TurnTile | None:
    """None where the kernel does not compute the product, or is not the faster."""
    num_outs, columns = weight.shape
    zero_bytes = 0 if weight.zero is None else weight.zero.element_size()
    if (
        num_rows > MOST_ROWS
        or weight.group != GROUP
        or num_outs % 16
        or columns % UNIT
        or zero_bytes > 1
        or not few_rows(num_outs, columns)
    ):
        return None
    rows = next(n for n in (1, 2, 4, 8) if n >= num_rows)
    if 2 * rows * columns > _MOST_HELD:
        return None
    return tile_of(num_outs, columns, rows, weight.scale.element_size(), zero_bytes > 0)


@cache
def tile_of(
    num_outs: int, columns: int, rows: int, scale_bytes: int, has_zero: bool
) -> TurnTile | None:
    """One block a multiprocessor, of as many outputs as leave the fewest to the busiest of them;
    of equals the largest. None: its shared memory does not fit."""
    found = []
    for sixteens in range(1, min(num_outs // 16, _MOST_SIXTEENS) + 1):
        blocks = -(-num_outs // (16 * sixteens))
        turns = -(-blocks // _PROCESSORS)
        tile = _with_ring(num_outs, columns, rows, sixteens, scale_bytes, has_zero)
        if tile is not None:
            found.append((turns * sixteens, -sixteens, tile))
    return min(found, key=lambda one: one[:2])[2] if found else None


def _with_ring(
    num_outs: int, columns: int, rows: int, side: int, scale_bytes: int, has_zero: bool
) -> TurnTile | None:
    """With as many slots as fit. None: fewer than two do."""
    ways, parts = ways_of(num_outs, columns), parts_of(num_outs, columns)
    mine = next((n for n in (2, 4, 8) if ways // n * side <= _MOST_WARPS), None)
    if mine is None:
        return None
    line = min(mine, _MOST_LINE)
    needed = columns // STAGE // ways * mine // line
    for slots in range(needed, min(needed, 2) - 1, -1):
        tile = TurnTile(rows, ways, parts, side, mine, line, slots)
        if tile.shared_by(columns, scale_bytes, has_zero) <= MOST_SHARED:
            of_slot = 1024 * line * tile.warps
            return replace(tile, early=max(1, min(slots, _EARLY // of_slot)))
    return None
